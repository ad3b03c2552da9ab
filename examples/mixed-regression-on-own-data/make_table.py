"""Write table.csv, to try the example: 40 clients with 12 rows each, which follow two models."""

import numpy as np

rng = np.random.default_rng(0)
models = np.array([[2.0, 0.5, 1.0], [-1.0, 1.5, 0.5]])
rows = []
for client in range(40):
    X = rng.standard_normal((12, 3))
    y = X @ models[int(client % 3 == 0)] + 0.2 * rng.standard_normal(12)
    rows.append(np.column_stack([np.full(12, client), y, X]))
np.savetxt("table.csv", np.vstack(rows), "%.6g", ",", header="client,y,x0,x1,x2", comments="")
