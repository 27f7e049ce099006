"""A rotation in a process of its own, that can be killed: prints a line after each page that it writes.

``python -m tests.encryption.rotating URL PAGE`` with the keyring in ``ONCEKEY_KEYS``. With ``--step`` it goes on to the
next page only after it has read a line: so a test can kill it in the middle of a page, however fast the machine is.
"""

from __future__ import annotations

import sys

from oncekey.encryption import Keyring
from oncekey.encryption.report import Report
from oncekey.encryption.rotation import Rotation, raw_values
from oncekey.stores.registry import open_store


def main() -> None:
    url, page, step = sys.argv[1], int(sys.argv[2]), "--step" in sys.argv
    store = open_store(url)

    def seen(report: Report) -> None:
        if not report.walks:
            return  # it only reads yet
        print(report.read, report.rewritten.total(), flush=True)
        if step:
            sys.stdin.readline()

    report = Rotation(raw_values(store), Keyring.from_env(), trust_key=True, page=page).run(seen)
    print("left", report.left.total(), flush=True)
    store.close()


if __name__ == "__main__":
    main()
