"""`python -m triptych` is the same program as `triptych`."""

from triptych.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
