"""How the tests of the wire damage bytes: at random, but each time the same."""


def flipped(data, chance):
    for _ in range(chance.randint(1, 4)):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def overwritten(data, chance):
    start = chance.randrange(len(data))
    length = min(chance.randint(1, 16), len(data) - start)
    data[start : start + length] = chance.randbytes(length)


def blanked(data, chance):
    start = chance.randrange(len(data))
    length = min(chance.randint(1, 64), len(data) - start)
    data[start : start + length] = bytes(length)


def moved(data, chance):
    start, to = sorted(chance.randrange(len(data)) for _ in range(2))
    data[start:to] = data[to - 1 : to] + data[start : to - 1]


def cut(data, chance):
    del data[chance.randrange(len(data)) :]


def extended(data, chance):
    data += chance.randbytes(chance.randint(1, 64))


def damaged(data, chance, begin=0):
    """The bytes with something wrong with them, behind ``begin``."""
    kept, changed = bytes(data[:begin]), bytearray(data[begin:])
    while changed == data[begin:]:
        chance.choice([flipped, overwritten, blanked, moved, cut, extended] if changed else [extended])(changed, chance)
    return kept + changed
