from tigon.cli import run

run()
