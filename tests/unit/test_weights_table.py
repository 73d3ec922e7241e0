"""The relay's slot table: what is refused, who loses a slot, and that one is always found."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from async_rl.protocol.weight_sync import Bucket, Manifest, TensorEntry
from async_rl.services.weight_sync.slots import Have, Refuse, SlotTable, Write


def manifest(version, epoch=1, name="w", shape=(4,)):
    entry = TensorEntry(name, "float32", list(shape), 0, 16)
    return Manifest(version, epoch, 16, [entry], [Bucket(0, 16, version)])


def publish(table, version, epoch=1):
    offered = table.offer(version, epoch)
    assert isinstance(offered, Write)
    assert table.judge(manifest(version, epoch), offered.index) is None
    table.show(manifest(version, epoch), offered.index)
    return offered


def test_nothing_is_visible_before_the_first_commit():
    table = SlotTable(3)
    assert (table.version, table.visible()) == (-1, None)
    table.offer(0, 1)
    assert table.version == -1


def test_a_version_is_visible_after_its_commit_and_not_at_its_offer():
    # field report 35: the version advances only after a successful publication
    table = SlotTable(3)
    publish(table, 0)
    table.offer(1, 1)
    assert table.version == 0
    table.give_up()
    assert table.version == 0
    publish(table, 1)
    assert table.version == 1


@pytest.mark.parametrize(
    ("version", "epoch", "said"),
    [(5, 1, "epoch 1 is older than 2"), (3, 2, "version 3 is older than the visible 4")],
)
def test_an_older_trainer_and_an_older_version_are_refused(version, epoch, said):
    table = SlotTable(3)
    publish(table, 4, epoch=2)
    for refused in (table.offer(version, epoch), table.judge(manifest(version, epoch), 1)):
        assert isinstance(refused, Refuse)
        assert said in refused.reason
    assert table.version == 4


def test_an_older_trainer_is_refused_from_the_moment_on_when_a_younger_one_began():
    table = SlotTable(3)
    publish(table, 4, epoch=1)
    written = table.offer(5, 1)
    assert isinstance(written, Write)
    table.fence(2)
    for refused in (table.judge(manifest(5, 1), written.index), table.offer(6, 1)):
        assert isinstance(refused, Refuse) and "epoch 1 is older than 2" in refused.reason
    assert table.version == 4


def test_an_older_trainer_is_refused_from_the_newer_ones_first_offer_on():
    table = SlotTable(3)
    publish(table, 4, epoch=1)
    table.offer(4, 2)
    assert isinstance(table.offer(5, 1), Refuse)


def test_a_repeat_of_the_visible_version_need_not_be_written():
    table = SlotTable(3)
    index = publish(table, 2).index
    assert table.offer(2, 1) == Have()
    assert table.judge(manifest(2), index) == Have()


def test_a_newer_trainer_may_publish_the_same_version_again():
    table = SlotTable(3)
    publish(table, 2, epoch=1)
    publish(table, 2, epoch=2)
    assert table.visible()[1].epoch == 2


@pytest.mark.parametrize(
    ("fields", "said"), [({"name": "v"}, "w: missing"), ({"shape": (2, 2)}, r"shape [2, 2], expected [4]")]
)
def test_another_model_than_before_is_refused(fields, said):
    table = SlotTable(3)
    publish(table, 0)
    refused = table.judge(manifest(1, **fields), 1)
    assert isinstance(refused, Refuse)
    assert said in refused.reason


def test_a_path_that_is_no_slot_and_the_visible_slot_are_refused():
    table = SlotTable(3)
    index = publish(table, 0).index
    assert isinstance(table.judge(manifest(1), None), Refuse)
    assert isinstance(table.judge(manifest(1), 3), Refuse)
    assert isinstance(table.judge(manifest(1), index), Refuse)


def test_a_relay_started_anew_adopts_and_gives_away_other_slots_as_new_files():
    table = SlotTable(3)
    assert table.judge(manifest(7), 1) is None
    table.show(manifest(7), 1)
    first = publish(table, 8)
    assert first.index != 1
    assert first.fresh  # a reader of the earlier relay may still hold it, and has no ticket here


def test_a_publication_given_up_gets_a_new_file_next_time():
    table = SlotTable(2)
    for version in range(3):
        publish(table, version)
    assert not table.offer(3, 1).fresh
    assert table.offer(3, 1).fresh


def test_an_idle_slot_is_taken_before_one_that_is_read():
    table = SlotTable(3)
    publish(table, 0)
    ticket = table.read("rollout-0")
    for version in range(1, 6):
        offered = publish(table, version)
        assert offered.revoked == []
        assert offered.index != ticket.index
    assert table.release("rollout-0", ticket.number)


def test_the_reader_that_began_longest_ago_loses_its_slot_when_all_are_read():
    table = SlotTable(3)
    tickets = {}
    for version in range(3):
        publish(table, version)
        tickets[version] = table.read(f"rollout-{version}")
    offered = publish(table, 3)
    assert offered.revoked == ["rollout-0"]
    assert not table.release("rollout-0", tickets[0].number)
    assert table.release("rollout-1", tickets[1].number)


def test_a_release_that_is_repeated_gets_its_first_answer():
    table = SlotTable(3)
    publish(table, 0)
    ticket = table.read("rollout-0")
    assert [table.release("rollout-0", ticket.number) for _ in range(2)] == [True, True]
    assert not table.release("rollout-1", ticket.number)
    assert not table.release("rollout-0", ticket.number + 1)


def test_a_new_incarnation_of_a_worker_drops_what_the_old_one_read():
    table = SlotTable(3)
    publish(table, 0)
    table.begin("rollout-0")
    dead = table.read("rollout-0")
    table.begin("rollout-0")
    assert table.readers == 0
    assert not table.release("rollout-0", dead.number)


def test_only_the_newest_fetch_of_a_worker_is_due():
    table = SlotTable(3)
    first, other, second = table.begin("rollout-0"), table.begin("rollout-1"), table.begin("rollout-0")
    assert not table.is_due("rollout-0", first)
    assert table.is_due("rollout-0", second)
    assert table.is_due("rollout-1", other)


class Publishing(RuleBasedStateMachine):
    """Any order of offers, commits, failures, reads, releases and deaths."""

    def __init__(self):
        super().__init__()
        self.table = SlotTable(3)
        self.version = 0
        self.writing = None
        self.reading = {}  # worker -> ticket it may still rely on

    @rule()
    def offer(self):
        offered = self.table.offer(self.version, 1)
        if self.table.version == self.version:
            assert offered == Have()
            return
        assert isinstance(offered, Write)  # a slot is always found
        visible = self.table.visible()
        assert visible is None or offered.index != visible[0]
        lost = {worker for worker, ticket in self.reading.items() if ticket.index == offered.index}
        assert set(offered.revoked) == lost
        assert not lost or len({t.index for t in self.reading.values()} - {visible[0]}) == 2  # none was idle
        for worker in lost:
            assert not self.table.release(worker, self.reading.pop(worker).number)
        self.writing = offered.index

    @precondition(lambda self: self.writing is not None)
    @rule(valid=st.booleans())
    def commit(self, valid):
        if valid:
            assert self.table.judge(manifest(self.version), self.writing) is None
            self.table.show(manifest(self.version), self.writing)
            self.version += 1
        self.writing = None

    @precondition(lambda self: self.table.visible() is not None)
    @rule(worker=st.sampled_from(["a", "b", "c", "d"]))
    def read(self, worker):
        self.table.begin(worker)
        self.reading[worker] = self.table.read(worker)

    @rule(worker=st.sampled_from(["a", "b", "c", "d"]))
    def release(self, worker):
        ticket = self.reading.pop(worker, None)
        if ticket is not None:
            assert self.table.release(worker, ticket.number)

    @invariant()
    def nobody_reads_what_is_written(self):
        assert self.writing is None or all(t.index != self.writing for t in self.reading.values())

    @invariant()
    def the_table_knows_its_readers(self):
        assert self.table.readers == len(self.reading)


TestPublishing = Publishing.TestCase
TestPublishing.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
