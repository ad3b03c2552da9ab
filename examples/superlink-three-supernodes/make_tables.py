"""Write site-0.csv, site-1.csv and site-2.csv: 200 rows each, with three atoms in common."""

import numpy as np

rng = np.random.default_rng(0)
basis = np.linalg.qr(rng.standard_normal((12, 12)))[0]
for site in range(3):
    own = np.linalg.qr(rng.standard_normal((9, 9)))[0][:3] @ basis[3:]
    weights = rng.uniform(1, 2, (200, 6)) * rng.choice([-1, 0, 1], (200, 6), p=[0.2, 0.6, 0.2])
    np.savetxt(f"site-{site}.csv", weights @ np.vstack([basis[:3], own]), "%.6g", ",")
