"""Python's cyclic garbage collector, kept from stopping a process that answers in milliseconds."""

import gc


def collect_nothing_yet() -> None:
    """No collection until `spare_what_stays`: imports make no garbage worth looking for.

    Walking what they have made, again and again, is a fifth of their time.
    """
    gc.disable()


def spare_what_stays() -> None:
    """Take all objects that exist now out of every later collection; call it once, after start.

    Modules, mapped classes and routes stay to the end of the process. Walking them at each full
    collection held a tick of the scheduler up by about 60 ms (`benchmarks/scheduler.py`).
    Source: https://docs.python.org/3/library/gc.html#gc.freeze
    """
    gc.collect()
    gc.freeze()
    # A thousand open streams make as many small objects at each event; at the default of 700 the
    # collector ran every few of them, a quarter of the time (`benchmarks/streams.py`).
    gc.set_threshold(20_000)
    gc.enable()
