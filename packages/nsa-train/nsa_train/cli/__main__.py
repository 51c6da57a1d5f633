from nsa_train.cli.main import main

main()
