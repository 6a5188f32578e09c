"""`python -m loader_service`: the command line, for launchers that start modules."""

from loader_service.cli.app import main

if __name__ == "__main__":
    main()
