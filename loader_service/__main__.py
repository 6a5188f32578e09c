"""`python -m loader_service`: the command line, for launchers that start modules."""

from loader_service.cli.signals import own_signals

if __name__ == "__main__":
    own_signals()  # first of all: a launcher may stop a rank while it still imports the rest
    from loader_service.cli.app import main

    main()
