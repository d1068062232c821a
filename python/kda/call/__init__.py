"""The ground floor: what every call needs. Modules of jobs stand on it and on nothing beside each other.

* ``library`` loads libkda and its binding, ``run`` calls it, with arguments by name.
* ``options`` are the numbers that stand for keywords, ``inputs`` what jobs do with their inputs first, ``arrays`` makes
  and shares arrays. ``shared`` are calls that eager functions and registered operators share.
* ``tracing`` and ``dispatch`` tell when torch has to see a call, ``graph`` defines the operators that it sees then.
* ``eager`` and ``derivatives`` are what torch's autograd has to know of the other calls.
* ``errors`` finds the sentence for a call that failed, and ``retry`` repeats one that only needs other views.
"""
