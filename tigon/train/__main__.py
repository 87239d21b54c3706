from tigon.train.launch import main

main()
