def all_of_them(l, g): return []
