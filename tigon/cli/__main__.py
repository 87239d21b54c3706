from tigon.cli import main

raise SystemExit(main())
