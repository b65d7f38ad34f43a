"""Check what an operator sees of a fault, that the remedy works, and that nothing is lost or doubled.

`frozen`: PostgreSQL hangs. `broker`: messages get lost, come twice and out of order. `clock`: it jumps an hour, and
back. `disk`: it returns errors. `versions`: an older proxy beside this one, on one database. `lost_folder`: a backup
made under load is restored. Loopback only; Linux; promtool evaluates the alert rules.
"""

import sys
from pathlib import Path

from benchmarks.faults.operating import broker, clock, disk, frozen, lost_folder, versions
from benchmarks.kit.check import figures_table, verdict
from benchmarks.kit.harness import opened
from benchmarks.kit.options import parser_of

FAULTS = {
    "frozen": frozen.run, "broker": broker.run, "clock": clock.run, "disk": disk.run, "versions": versions.run,
    "lost_folder": lost_folder.run,
}  # fmt: skip


def main() -> int:
    """Run one check."""
    parser = parser_of(
        "What an operator sees of a fault, and whether anything is lost or doubled.",
        {
            "fault": {"choices": sorted(FAULTS)},
            "--connections": {"type": int, "default": 8},
            "--rate": {"type": float, "default": 40, "help": "requests a second, all connections together"},
            "--seed": {"type": int, "default": 0, "help": "of what the apps do"},
            "--durability": {"choices": ("journal", "fsync"), "default": "journal", "help": "proxy.durability"},
            "--old": {"metavar": "COMMIT", "help": "versions: the older one [before the newest migration]"},
            "--data": {"type": Path, "help": "an empty folder for databases, journal and logs, which then stay"},
        },
    )
    args = parser.parse_args()
    with opened(args.fault, args.data) as (data, console):
        seen = FAULTS[args.fault](data, args)
    console.print(figures_table(seen.figures))
    return verdict(seen.faults, console)


if __name__ == "__main__":
    sys.exit(main())
