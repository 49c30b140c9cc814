import sys

sys.path.insert(0, "/app")
from adder import add

assert [add(2, 3), add(-1, 1), add(0, 0)] == [5, 0, 0]
