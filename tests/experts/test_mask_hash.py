"""The hash that names a routable set."""

from tided.experts.mask_hash import key_of, mask_hash


def test_the_hash_of_a_set_is_the_one_that_changes_add_up_to():
    pairs = [(layer, expert) for layer in range(75) for expert in range(0, 256, 3)]
    value = 0
    for pair in pairs:
        value ^= key_of(pair, 256)
    assert mask_hash(pairs, 256) == value == mask_hash(reversed(pairs), 256)
    assert mask_hash([], 256) == 0
