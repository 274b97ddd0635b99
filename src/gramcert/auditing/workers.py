"""Many measurements, one after the other or in several processes, each kept as soon as it is made."""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from gramcert.auditing.cache import Cache
from gramcert.operators.measurement import Measured, Measurement
from gramcert.progress import Report, silent


def measure_all(
    measurements: list[Measurement],
    tol: float,
    cache: Cache,
    *,
    jobs: int = 1,
    max_seconds: float | None = None,
    report: Report = silent,
) -> dict[str, Measured]:
    """The results by the keys of the measurements. Interrupted, it leaves in the cache what was finished."""
    found: dict[str, Measured] = {}
    open_ones: dict[str, Measurement] = {}
    for measurement in measurements:
        key = measurement.key(tol)
        if key in found or key in open_ones:
            continue
        known = measurement.run(tol, None) if measurement.is_instant else cache.get(key)
        if known is not None:
            found[key] = known
        else:
            open_ones[key] = measurement
    total = len(found) + len(open_ones)

    def keep(key: str, measured: Measured) -> None:
        found[key] = measured
        if max_seconds is None:  # what was made in haste may be known better the next time
            cache.put(key, measured)

    def tell(name: str) -> None:
        report(name, len(found), total)

    if jobs > 1 and len(open_ones) > 1:
        _in_processes(open_ones, tol, max_seconds, jobs, keep, tell)
    else:
        for key, measurement in open_ones.items():
            tell(f"{measurement.kind} {measurement.geometry}")
            keep(key, measurement.run(tol, max_seconds))
    tell("")
    return found


def _in_processes(
    measurements: dict[str, Measurement],
    tol: float,
    max_seconds: float | None,
    jobs: int,
    keep: Callable[[str, Measured], None],
    tell: Callable[[str], None],
) -> None:
    workers = min(jobs, len(measurements))
    threads = max(1, (os.cpu_count() or 1) // workers)
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=torch.set_num_threads, initargs=(threads,))
    try:
        tell("")
        waiting = {pool.submit(_run, item, tol, max_seconds): key for key, item in measurements.items()}
        for future in as_completed(waiting):
            measurement = measurements[waiting[future]]
            keep(waiting[future], future.result())
            tell(f"{measurement.kind} {measurement.geometry}")
    except BaseException:
        for process in (pool._processes or {}).values():  # an interrupted user does not wait for a long proof
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _run(measurement: Measurement, tol: float, max_seconds: float | None) -> Measured:
    return measurement.run(tol, max_seconds)
