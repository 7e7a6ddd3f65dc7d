#!/usr/bin/env python3
"""Stands for ssh: mpirun calls it with a machine's name and a command, which ``Machines`` runs there."""

import array
import json
import os
import socket
import sys

STANDARD = array.array("i", [0, 1, 2])


def main() -> int:
    with socket.socket(socket.AF_UNIX) as asked:
        asked.connect(os.environ["MACHINES_SOCKET"])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, STANDARD)]
        asked.sendmsg([json.dumps([sys.argv[1], " ".join(sys.argv[2:])]).encode()], rights)
        return int(asked.recv(8) or 1)  # nothing: whoever served has ended


if __name__ == "__main__":
    sys.exit(main())
