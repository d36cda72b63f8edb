"""Clients: requests arrive late, and are aborted in the order of their timeouts."""

from hicache.clock import NEVER
from hicache.config import Arrivals, WorkloadConfig
from hicache.workload.clients import Clients
from hicache.workload.feeder import Feeder
from tests.scheduler.world import request_of

REQUESTS = [request_of(number, [1], [1], arrival_ns=number) for number in range(5)]


def clients_of(*, late_ns: int = 0, patience_ns: dict[int, int] | None = None) -> Clients:
    feeder = Feeder(REQUESTS, WorkloadConfig(arrivals=Arrivals.open))
    return Clients(feeder, late_ns=late_ns, patience_ns=patience_ns)


def test_waiting_requests_are_aborted_in_the_order_of_their_timeouts():
    clients = clients_of(patience_ns={0: 50, 1: 10, 2: 30, 4: 20})
    for released_ns, request in clients.arrivals(4):
        clients.wait(request.id, request.id % 2, released_ns)
    assert clients.next_ns == 11
    clients.answered(1, 7)
    assert clients.next_ns == 24
    assert clients.give_up(23) == []
    assert clients.give_up(32) == [(0, 4), (0, 2)]
    assert clients.give_up(49) == []
    assert clients.give_up(50) == [(0, 0)]
    assert clients.next_ns == NEVER


def test_a_request_arrives_late_and_keeps_the_time_of_its_release():
    clients = clients_of(late_ns=10)
    assert clients.next_ns == 10
    assert clients.arrivals(9) == []
    assert clients.arrivals(12) == [(number, REQUESTS[number]) for number in range(3)]
    assert clients.next_ns == 13
