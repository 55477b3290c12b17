"""The hash that names a routable set."""

from tided.experts.mask_hash import keys_of_all, mask_hash


def test_the_hash_of_a_set_is_the_one_that_changes_add_up_to():
    pairs = [(layer, expert) for layer in range(75) for expert in range(0, 256, 3)]
    keys, value = keys_of_all(75, 256), 0
    for layer, expert in pairs:
        value ^= keys[layer][expert]
    assert mask_hash(pairs, 256) == value == mask_hash(reversed(pairs), 256)
    assert mask_hash([], 256) == 0


def test_a_pairs_key_is_splitmix64_of_its_number_from_1():
    """The generator's first outputs for the seed 0."""
    assert keys_of_all(1, 3) == [[0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]]
    assert keys_of_all(2, 3)[1][0] == 0xF88BB8A8724C81EC
