"""Write table.csv, to try the example: a site and twelve measurements in each row.

A measurement combines few of six patterns: three occur at every site, three at that site alone.
"""

import numpy as np

rng = np.random.default_rng(0)
basis = np.linalg.qr(rng.standard_normal((12, 12)))[0]
shared, others = basis[:3], basis[3:]
rows = []
for site in range(5):
    own = np.linalg.qr(rng.standard_normal((9, 9)))[0][:3] @ others
    weights = rng.uniform(1, 2, (200, 6)) * rng.choice([-1, 0, 1], (200, 6), p=[0.2, 0.6, 0.2])
    samples = weights @ np.vstack([shared, own]) + 0.05 * rng.standard_normal((200, 12))
    rows.append(np.column_stack([np.full(200, site), samples]))
columns = ["site", *(f"x{column}" for column in range(12))]
np.savetxt("table.csv", np.vstack(rows), "%.6g", ",", header=",".join(columns), comments="")
