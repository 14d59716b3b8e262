"""0005: a wait leaves the CPU alone, and ends when the GPU does."""

from tests.patches.tegra.device import Tegra

# Tokens of 50 ms: what the GPU waits for comes from a timer, the rest of a token takes it no time.
TOKENS = """
d, waits, late = Device["NV"], [], []
released = [0.0]
def token():
    block = d.new_signal(value=0)
    def release():
        released[0] = time.perf_counter()
        block.value = 1
    d.hw_compute_queue_t().wait(block, 1).signal(d.timeline_signal, d.next_timeline()).submit(d)
    threading.Timer(0.05, release).start()
    d.timeline_signal.wait(d.timeline_value - 1)
    late.append(time.perf_counter() - released[0])
token()
wall, cpu = time.perf_counter(), time.thread_time()
for _ in range(20): token()
wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
say(share=cpu / wall, wall=wall, late=sorted(late)[len(late) // 2], events=d.iface.has_events)
"""


def test_a_wait_leaves_the_cpu_alone(tegra: Tegra) -> None:
    run = tegra(TOKENS)
    assert run.said["wall"] > 1.0 and run.said["events"]
    assert run.said["share"] < 0.15


# The event's cost for a token: the waiting thread's own CPU time from where the kernel has woken it
# until wait() has returned, which a busy machine does not stretch as it does time by the clock.
LATENCY = """
real, woken, ended, asked = d.iface.poller.poll, [0.0], [], set()
class Poller:
    def poll(self, timeout):
        asked.add(timeout)
        shown = real(timeout)
        woken[0] = time.thread_time()
        ended.append(bool(shown))
        return shown
d.iface.poller, costs = Poller(), []
for _ in range(40):
    before = len(ended)
    token()
    costs.append(time.thread_time() - woken[0])
    assert len(ended) > before
costs.sort()
say(least_us=1e6 * costs[0], median_us=1e6 * costs[20], by_event=sum(ended), tokens=len(costs),
    longest_ms=max(asked))
"""


def test_an_event_ends_the_wait_and_costs_a_token_little(tegra: Tegra) -> None:
    run = tegra(TOKENS + LATENCY)
    assert run.said["least_us"] < 50  # of 40 tokens, the one that other processes disturb least
    assert run.said["by_event"] >= 0.8 * run.said["tokens"]  # a signal may come between two polls
    assert 0 < run.said["longest_ms"] <= 2  # between two polls it looks for a fault


NO_EVENTS = """
from nvgpusim.orin.kernel.tsg import Tsg
Tsg.post_event, slept, real_sleep = (lambda *args: None), [], time.sleep
def counted(seconds):
    if threading.current_thread() is threading.main_thread(): slept.append(seconds)
    real_sleep(seconds)
time.sleep = counted
"""


def test_without_events_a_wait_sleeps(tegra: Tegra) -> None:
    # nvgpu posts to whoever listens to its TSG; a board that does not is waited for by sleeping.
    run = tegra(NO_EVENTS + TOKENS + "say(slept=len(slept), longest=max(slept))")
    assert not run.said["events"] and run.said["slept"] >= 20  # at least once a token
    assert 0 < run.said["longest"] <= 0.001  # what a token waits for nothing


def test_a_short_wait_asks_the_kernel_nothing(tegra: Tegra) -> None:
    run = tegra("""
d, real, slept = Device["NV"], None, []
real = d.iface.sleep
d.iface.sleep = lambda tm: slept.append(d.timeline_signal._sleep) or real(tm)
d.timeline_signal._sleep(0)
say(at_once=len(slept))
d.timeline_signal._sleep(1)
say(later=len(slept))
""")
    assert run.said == {"at_once": 0, "later": 1}
