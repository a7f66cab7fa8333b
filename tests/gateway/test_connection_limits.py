"""The connections that may stay: random crowds, and the promise of each rule."""

from __future__ import annotations

import random

from edgeshard.gateway.connections.connection_limits import Crowd, neighbourhood


class Run:
    """A crowd whose order to go is followed, as the listener does."""

    def __init__(self, crowd: Crowd) -> None:
        self.crowd = crowd
        self.there: set[int] = set()
        self.known: dict[int, str] = {}
        self.busy: set[int] = set()
        self._last = 0

    def _end(self, going: int | None) -> int | None:
        if going is not None:
            self.leave(going)
        return going

    def leave(self, number: int) -> None:
        self.crowd.left(number)
        self.there.discard(number)
        self.known.pop(number, None)
        self.busy.discard(number)

    def come(self, address: str) -> tuple[int, int | None]:
        self._last += 1
        self.there.add(self._last)
        return self._last, self._end(self.crowd.came(self._last, address))

    def show(self, number: int, identity: str) -> int | None:
        self.known[number] = identity
        return self._end(self.crowd.showed_key(number, identity))

    def ask(self, number: int, is_busy: bool) -> None:
        self.crowd.busy(number, is_busy)
        (self.busy.add if is_busy else self.busy.discard)(number)


def test_the_oldest_stranger_of_an_address_makes_room_for_the_next() -> None:
    run = Run(Crowd(most=100, most_keyless=3))
    first, second, *_ = [run.come("a")[0] for _ in range(3)]
    assert run.come("b")[1] is None, "another address has its own"
    assert run.show(first, "key/me") is None
    assert run.come("a")[1] is None
    assert run.come("a")[1] == second, "who has shown a key is none of them"


def test_a_flood_makes_room_for_itself() -> None:
    """However many come: the others stay, whether they have shown a key yet or not."""
    run = Run(Crowd(most=12, most_keyless=15))
    known, stranger = run.come("honest")[0], run.come("honest")[0]
    run.show(known, "key/me")
    for _ in range(500):
        number, going = run.come("flood")
        assert going != number
    assert {known, stranger} <= run.there and len(run.there) == 12


def test_where_all_have_keys_an_idle_one_of_whoever_has_most_goes() -> None:
    run = Run(Crowd(most=4))
    mine = run.come("a")[0]
    run.show(mine, "key/me")
    theirs = [run.come("b")[0] for _ in range(3)]
    for number in theirs:
        run.show(number, "key/many")
    run.ask(theirs[0], True)
    assert run.come("c")[1] == theirs[1]


def test_no_identity_has_all_connections() -> None:
    run = Run(Crowd(most=10, most_of_one=3))
    first, second, third, fourth = (run.come("a")[0] for _ in range(4))
    for number in (first, second, third):
        run.show(number, "key/many")
        run.ask(number, True)
    assert run.show(fourth, "key/many") == fourth, "the others have requests"
    run.ask(second, False)
    fifth = run.come("a")[0]
    assert run.show(fifth, "key/many") == second
    for _ in range(5):
        assert run.show(run.come("a")[0], "") is None, "without keys everyone is one"


def test_random_crowds_keep_their_limits_and_end_nobody_with_a_request() -> None:
    for seed in range(200):
        chance = random.Random(seed)
        run = Run(Crowd(most=12, most_keyless=5, most_of_one=8))
        for _ in range(300):
            at_random = chance.choice(sorted(run.there) or [0])
            busy, known = set(run.busy), dict(run.known)
            going: int | None = None
            match chance.randrange(4):
                case 0:
                    at_random, going = run.come(chance.choice("abc"))
                case 1 if at_random:
                    going = run.show(at_random, chance.choice(["key/x", "key/y"]))
                case 2 if at_random in run.known:
                    run.ask(at_random, chance.random() < 0.7)
                case 3 if at_random:
                    run.leave(at_random)
            if going is not None and going != at_random:
                assert going not in busy or going not in known, (
                    "one with a key and a request was ended"
                )
            assert len(run.there) == len(run.crowd) <= 12
            assert max(run.crowd._strangers.values(), default=0) <= 5
            assert max(run.crowd._known.values(), default=0) <= 8


def test_a_network_of_ipv6_counts_as_one_address() -> None:
    assert (
        neighbourhood("2001:db8:1:2::7")
        == neighbourhood("2001:db8:1:2:ffff::1")
        != neighbourhood("2001:db8:1:3::7")
    )
    assert (
        neighbourhood("::ffff:10.0.0.1") == neighbourhood("10.0.0.1") != neighbourhood("10.0.0.2")
    )
    assert neighbourhood("fe80::1%eth0") == neighbourhood("fe80::2")
