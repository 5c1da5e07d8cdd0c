"""``python -m streamload``."""

from streamload.cli import main

if __name__ == "__main__":
    main()
