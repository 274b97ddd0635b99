"""Waiting for what other processes do. Nothing is expected within a time: an hour only ends what hangs."""

import threading

PATIENCE = 3600.0  # seconds


def next_line(process):
    """What it prints next, or nothing if it ends before."""
    guard = threading.Timer(PATIENCE, process.kill)
    guard.start()
    try:
        return process.stdout.readline().strip()
    finally:
        guard.cancel()
