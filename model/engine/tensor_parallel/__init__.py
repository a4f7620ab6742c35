"""Computing one network with several processes: rank 0 decides what is computed, the other ranks follow its messages.

`leading_network.py` is the network of rank 0. It sends a message (`messages.py`) before each pass. `follower.py` is the
loop of the other ranks, which compute the same pass. `shared_taps.py` lets the taps of rank 0 read and change stages of
which each rank has a part.
"""
