"""How long things take in the demo: much shorter than is wise in production, and long enough to be watched."""

from __future__ import annotations

import os

PACE = float(os.environ.get("ONCEKEY_DEMO_PACE", "1"))
"""Our own tests watch faster than people do."""

LEASE_SECONDS = 3.0 * PACE
"""You see quickly what a crash leads to; the default is 60 s, and 30 s in a worker."""
QUARANTINE_SECONDS = 5.0 * PACE
"""Likewise; 5 minutes is the default."""
LOOK_SECONDS = 1.0 * PACE
"""How often upkeep sweeps and reconciles."""
SLOW_SECONDS = 3.0 * PACE
"""What ``?simulate=slow`` takes."""
