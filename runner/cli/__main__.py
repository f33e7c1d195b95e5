"""``python -I -m runner.cli``: the `ringfence` command for daemons, service files and root."""

from runner.cli.main import main

if __name__ == "__main__":
    main()
