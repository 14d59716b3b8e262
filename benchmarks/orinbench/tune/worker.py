"""The worker of `orinbench tune`: one request on standard input, events on standard output.

Both are JSON, one object a line. Events come as kernels are done, so that whoever reads them has
everything up to the moment it stops. Standard output belongs to them: tinygrad prints there too, so
file descriptor 1 is pointed at standard error before tinygrad is imported.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from orinbench.benchmark.worker import one_line
from orinbench.tune.opts import parse_opts
from orinbench.tune.tuning import Target

Tell = Callable[..., None]


def search_all(request: Mapping[str, Any], kernels: Mapping[str, Any], tell: Tell) -> None:
    """Search the kernels of a model at a level, those first that take most of its time.

    Those that the request knows for this very target go into the cache as they are.
    """
    from orinbench.tune.kernels import (
        Bench,
        OptsError,
        in_cache,
        into_cache,
        target,
        timing,
        to_text,
    )

    bench, level, here = Bench(), int(request["level"]), target()
    known = {e["kernel"]: e["opts"] for e in request["known"] if Target(**e["target"]) == here}
    share: dict[str, float] = {}
    for digest, kernel in kernels.items():
        if digest in request["skip"]:
            continue
        try:
            usual = bench.usual(kernel).median
        except OptsError as error:
            tell("failed", kernel=digest, error=str(error))
            continue
        share[digest] = usual * kernel.launches.total()
        told = {"name": kernel.name, "launches": dict(kernel.launches), "default_us": usual}
        tell("kernel", kernel=digest, **told)
    tell("met")
    for digest in sorted(share, key=lambda digest: (-share[digest], digest)):
        kernel = kernels[digest]
        cached = in_cache(kernel, level)
        if digest in known:
            if cached != known[digest]:
                into_cache(kernel, level, parse_opts(known[digest]))
            continue
        tell("begin", kernel=digest)
        try:
            found, seconds, candidates = bench.search(kernel, level)
            before, after, kept = bench.judge(kernel, found)
        except Exception as error:  # of the compilers and drivers of six devices
            tell("failed", kernel=digest, error=one_line(error))
            continue
        default, opts = to_text(kernel.default().applied_opts), to_text(found.applied_opts)
        if not kept:  # the search looks at single launches and may be mistaken
            opts, after = default, before
            into_cache(kernel, level, parse_opts(default))
        tell(
            "found",
            kernel=digest,
            opts=opts,
            default_opts=default,
            before=asdict(timing(before)),
            after=asdict(timing(after)),
            search_s=round(seconds, 3),
            candidates=candidates,
            from_cache=cached is not None,
            default_kept=not kept,
        )


def check_all(request: Mapping[str, Any], kernels: Mapping[str, Any], tell: Tell) -> None:
    """Check entries against the defaults; put those that hold where `beam_search` looks.

    Those of another patch series are tried too: each is checked. Those of another target never.
    """
    from orinbench.tune.kernels import Bench, OptsError, into_cache, target, timing

    bench, here = Bench(), target()
    for entry in request["entries"]:
        about, made = {"entry": entry["entry"]}, Target(**entry["target"])
        if replace(made, series=here.series) != here:
            tell("foreign", **about)
            continue
        if (kernel := kernels.get(entry["kernel"])) is None:
            tell("absent", **about)
            continue
        tell("begin", **about)
        opts = parse_opts(entry["opts"])
        try:
            before, after, holds = bench.judge(kernel, kernel.optimized(opts))
        except OptsError as error:
            tell("rejected", **about, reason=str(error))
            continue
        times = {"before": asdict(timing(before)), "after": asdict(timing(after))}
        if holds:
            into_cache(kernel, entry["level"], opts)
            tell("accepted", **about, **times)
        else:
            medians = " -> ".join(f"{times[side]['median']:.1f}" for side in times)
            tell("rejected", **about, reason=f"slower than the default here, {medians} us")


def serve(request: Mapping[str, Any], tell: Tell) -> None:
    """Do what one request asks."""
    from orinbench.tune.kernels import measured_on, model_kernels, target

    tell("opened", target=asdict(target()), measured_on=measured_on())
    path, general = Path(request["model"]), bool(request["general"])
    kernels, by_hand = model_kernels(path, request["context"], request["chunk"], general)
    tell("model", kernels=len(kernels), by_hand=by_hand)
    if request["mode"] == "search":
        search_all(request, kernels, tell)
    else:
        check_all(request, kernels, tell)
    tell("end")


def main() -> None:
    """Serve one request on the device that DEV names; what goes wrong is the last event."""
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(event: str, **values: Any) -> None:
        events.write(json.dumps({"event": event, **values}) + "\n")
        events.flush()

    try:
        serve(json.loads(sys.stdin.readline()), tell)
    except Exception as error:
        tell("died", error=one_line(error))


if __name__ == "__main__":
    main()
