"""Runs `triptych` as `python -m triptych`."""

from triptych.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
