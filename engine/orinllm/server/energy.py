"""Joules by phase, where the machine has power rails: what `jetson` reads, shared out by time."""

import threading
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from orinboard.energy import DEFAULT_HERTZ, EnergySampler, Reader

#: What the machine does when it computes nothing.
IDLE = "idle"
# Seconds without work that are shared out before the work that ends them, which draws more.
_LONG = 1.0


class PhaseEnergy(Collector):
    """Shares the energy of each short while out among the phases that the device worked in it.

    A while is as long as a sample of the rails at least; what is left of it is idle. A machine
    without rails has no metric.
    """

    def __init__(self, sampler: EnergySampler) -> None:
        self._sampler, self._lock = sampler, threading.Lock()
        self._joules: dict[str, float] = {"prefill": 0.0, "decode": 0.0, IDLE: 0.0}
        self._worked: dict[str, float] = {}
        self._counted = self._until = 0.0  # joules and seconds that were shared out

    def worked(self, phase: str, seconds: float) -> None:
        """The device worked so long in a phase, until now."""
        with self._lock:
            idle = self._sampler.energy().seconds - self._until - seconds
            if not self._worked and idle > _LONG:
                self._share()
            self._worked[phase] = self._worked.get(phase, 0.0) + seconds
            if sum(self._worked.values()) >= 1 / DEFAULT_HERTZ:
                self._share()

    def _share(self) -> None:
        energy = self._sampler.energy()
        if energy.total_joules is None:
            return
        passed = energy.seconds - self._until
        if passed <= 0:
            return
        joules = energy.total_joules - self._counted
        self._counted, self._until = energy.total_joules, energy.seconds
        worked = sum(self._worked.values())
        # The rails' last sample may be a little older than the work.
        while_ = max(passed, worked)
        for phase, seconds in self._worked.items():
            self._joules[phase] += joules * seconds / while_
        self._joules[IDLE] += joules * (while_ - worked) / while_
        self._worked.clear()

    def collect(self) -> Iterator[Metric]:
        """Yield the counters; nothing where nothing is measured."""
        with self._lock:
            self._share()
            joules = dict(self._joules)
        energy = self._sampler.energy()
        if energy.total_joules is None:
            return
        family = CounterMetricFamily(
            "orinllm_energy_joules", "Energy of the rails by phase.", labels=["phase"]
        )
        for phase, value in joules.items():
            family.add_metric([phase], value)
        yield family
        info = InfoMetricFamily("orinllm_energy_boundary", "What the rails hold and leave out.")
        info.add_metric([], {"boundary": energy.boundary or "", "rails": " ".join(energy.summed)})
        yield info


def measure(
    registry: CollectorRegistry, readers: Sequence[Reader] | None = None
) -> PhaseEnergy | None:
    """Measure from now on and show it; None where the machine has no power rails.

    `readers` are asked instead of all that `jetson` has.
    """
    sampler = EnergySampler(monotonic=True, readers=readers).start()
    if sampler.last is None or not sampler.last.rails:
        sampler.stop()
        return None
    energy = PhaseEnergy(sampler)
    registry.register(energy)
    return energy
