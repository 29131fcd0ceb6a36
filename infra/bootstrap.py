"""From a bare checkout to a `.venv` that can run the platform: `python3 infra/bootstrap.py`.

Standard library only, and written so that any Python 3 can read it: an unsuitable one gets one
clear line instead of a traceback. The work itself is in `infra/environment.py`.
"""

import os
import sys

OLDEST = (3, 11)
NEWEST = (3, 13)


def find_suitable_python():
    # type: () -> str
    """The path of a Python between OLDEST and NEWEST: this one, else one on the PATH, else ''."""
    if OLDEST <= sys.version_info[:2] <= NEWEST:
        return sys.executable
    folders = os.environ.get("PATH", "").split(os.pathsep)
    for minor in range(OLDEST[1], NEWEST[1] + 1):
        for folder in folders:
            candidate = os.path.join(folder, "python3.{}".format(minor))  # noqa: PTH118, UP032
            if os.access(candidate, os.X_OK):
                return candidate
    return ""


def main():
    # type: () -> None
    """Continue in `infra/environment.py` under a suitable Python, or say what is missing."""
    python = find_suitable_python()
    if not python:
        sys.exit(
            "nCompass needs Python 3.11, 3.12 or 3.13, and `{}` is {}.{}."  # noqa: UP032
            " Install one of them, or name it: make run PYTHON=/path/to/python3.12".format(
                sys.executable, sys.version_info[0], sys.version_info[1]
            )
        )
    os.chdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
    # -B: the checkout gets no compiled files from a Python that it may never use again.
    os.execv(python, [python, "-B", "-m", "infra.environment"] + sys.argv[1:])  # noqa: RUF005, S606


if __name__ == "__main__":
    main()
