"""`python -m tui`: the explorer with its first preset."""

from tui.app import Explorer

if __name__ == "__main__":
    Explorer().run()
