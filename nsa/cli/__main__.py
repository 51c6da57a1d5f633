from nsa.cli.main import main

main()
