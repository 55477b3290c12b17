"""Every message between ranks. msgpack by msgspec tagged structs; nothing else is ever decoded (contract C7).

A step is decided by rank 0 and replayed by the others (C1): whatever a step does, it does because the message says so.
"""

import msgspec

from tided.engine.types import Request


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    pass


class Hello(Message, frozen=True):
    """A rank asks rank 0 to be let in. `facts` are its boot guard fields, `name -> value` as text."""

    rank: int
    facts: dict[str, str]


class Welcome(Message, frozen=True):
    """Rank 0 agrees. `residents` are the (layer, expert) pairs to load, the same on every rank."""

    session: str
    residents: list[tuple[int, int]]


class Refused(Message, frozen=True):
    """Rank 0 does not let the rank in; both end. `differences` are (field, rank 0's value, the rank's value)."""

    differences: list[tuple[str, str, str]]


class Ready(Message, frozen=True):
    """A rank holds all its weights and residents. `residents_digest` is computed from what it really loaded."""

    rank: int
    residents_digest: str


class Restore(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The lane begins with the snapshot that every rank has read for `ticket`: the prompt's first `tokens`."""

    ticket: int
    tokens: int


class Admission(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lane: int
    request: Request
    restore: Restore | None = None


class Recall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Begin to read back, beside the work: the first of these snapshots that is there and whole (`keys`, the longest
    prefix first), or all of a parked `lane`."""

    ticket: int
    keys: list[str] = []
    lane: int = -1


class Prefill(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Compute prompt tokens [start, start + count) of a lane; the last chunk also samples the first token. `count` 0:
    the whole prompt was restored, and the first token is drawn from the restored logits. `propose`: draft what may come
    behind that token; `places`: so many tokens, 0: as many as the drafter gives. `a_part`: of a scored chunk a layer,
    or the scores of some rows, and no more; steps of the same chunk follow until it is done."""

    lane: int
    start: int
    count: int
    propose: bool = False
    places: int = 0
    a_part: bool = False


class Decode(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A step of each of these lanes, in this order. `drafts`: how many of a lane's proposed tokens are verified with it
    (empty: none of any); which they are every rank knows from replicated logits. `propose`: draft for the lanes after
    it, `places` tokens or, at 0, as many as the drafter gives; what was proposed before is over."""

    lanes: list[int]
    drafts: list[int] = []
    propose: bool = False
    places: int = 0


class Swap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """(layer, expert) `out` leaves the resident set, `in_` takes its place."""

    out: tuple[int, int]
    in_: tuple[int, int]


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Begin to read `pair` now, beside the work. `out`: the resident whose place it takes once it is published; None:
    it joins the hot ring, or takes a free place among the residents (`joins`). `ticket` names the read from here on."""

    ticket: int
    pair: tuple[int, int]
    out: tuple[int, int] | None = None
    joins: bool = False

    @property
    def moves_residents(self) -> bool:
        return self.joins or self.out is not None


class Resize(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From now on there are places for so many residents, by size of records; `evict` leave, whose places these were.
    Nothing is being read on any rank."""

    residents: list[int]
    evict: list[tuple[int, int]] = []


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What happens to the routable set before a step's work, in this order (C2). `publish`: reads that every rank has;
    `promote`: a resident and an entry of the ring exchange roles; `withdraw`: entries of the ring that leave;
    `give_up`: reads that have ended on every rank, and not well on all; `resize`; `adopt`: entries of the ring that
    take free places among the residents; `load`: reads that begin."""

    publish: list[int] = []
    promote: list[Swap] = []
    withdraw: list[tuple[int, int]] = []
    load: list[Load] = []
    give_up: list[int] = []
    resize: Resize | None = None
    adopt: list[tuple[int, int]] = []

    def __bool__(self) -> bool:
        moves = self.publish or self.promote or self.withdraw or self.adopt
        return bool(moves or self.load or self.give_up or self.resize)


class Mask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tokens that `lane` may draw in this step: a bit each, a byte's lowest bit first; beyond the end: none."""

    lane: int
    bits: bytes


class Step(Message, frozen=True):
    """One step of the engine: releases, lanes that are parked and resumed, admissions, the change of the routable set,
    reads that begin, the work, snapshots. `seq` rises by one; `plan_version` counts the steps that changed who is
    resident.

    `park`: lanes whose context leaves the pool for the disk; they keep their number. `resume`: lanes whose context
    every rank has read back. `forget`: tickets of recalls that are not wanted any more. `save`: lanes whose context,
    after the work, becomes a snapshot of the prompt cache. `masks`: what lanes under a grammar may draw."""

    seq: int
    plan_version: int
    release: list[int] = []
    admit: list[Admission] = []
    change: Change = Change()
    work: Prefill | Decode | None = None
    digest_due: bool = False
    park: list[int] = []
    resume: list[int] = []
    recall: list[Recall] = []
    forget: list[int] = []
    save: list[int] = []
    masks: list[Mask] = []


class Landed(Message, frozen=True):
    """These reads have ended on this rank, the `failed` ones without their record. Rank 0 may publish what every rank
    has, and gives up what some rank has not once it has ended on all."""

    rank: int
    tickets: list[int]
    failed: list[int] = []


class Recalled(Message, frozen=True):
    """What a rank has for a `Recall`: which of its keys (or 0, the parked lane) it holds, and which of them it has read
    and checked, -1 for none. Rank 0 restores only what every rank has read (C1)."""

    rank: int
    ticket: int
    held: list[int]
    loaded: int


class Digest(Message, frozen=True):
    """A rank's running digest after step `seq`: mask, chosen experts, sampled tokens (C3)."""

    rank: int
    seq: int
    digest: str


class Stop(Message, frozen=True):
    """The pair ends in order after this message."""

    reason: str


class Heartbeat(Message, frozen=True):
    """Sent by the loop of each rank. `engine_seq` is the last step its engine finished; `session` is that of Welcome:
    a leftover of an earlier start does not count as alive. `available_bytes`: memory that its node could still give."""

    rank: int
    engine_seq: int
    session: str = ""
    available_bytes: int = 0


class Fault(Message, frozen=True):
    """A rank ends because of an error; the others end too."""

    rank: int
    message: str


ControlMessage = Hello | Welcome | Refused | Ready | Step | Landed | Recalled | Digest | Stop | Heartbeat | Fault
