from adder import add

print("ok" if add(2, 3) == 5 else "wrong")
