"""Reports: four findings, of which the main one decides about the label."""

from collections.abc import Sequence
from zlib import crc32

import numpy as np
import torch
from flwr.app import Context
from torch.utils.data import DataLoader, TensorDataset

from flwr_perdl.clients import Member

FINDINGS = (  # by department, which is the label
    "angina murmur palpitations arrhythmia bradycardia tachycardia infarction stenosis syncope",
    "cough wheeze dyspnea asthma sputum pneumonia bronchitis pleurisy hemoptysis",
    "headache seizure tremor vertigo aphasia migraine neuropathy ataxia numbness",
    "fracture sprain arthritis gout lumbago sciatica tendinitis bursitis osteoporosis",
    "rash eczema itching acne urticaria psoriasis melanoma blister cellulitis",
    "nausea colic reflux jaundice ascites gastritis hernia hepatitis ulcer",
)
LENGTH, N_WORDS, N_LABELS = 4, 2000, len(FINDINGS)


def to_tokens(texts: Sequence[str]) -> torch.Tensor:
    """Return each text's first words as numbers: hashes from 2 on; 0 is none, 1 a hidden word."""
    rows = [[crc32(word.encode()) % (N_WORDS - 2) + 2 for word in text.split()] for text in texts]
    return torch.tensor([(row + [0] * LENGTH)[:LENGTH] for row in rows])


def public_reports() -> list[str]:
    """Return reports without labels, each from one department."""
    rng = np.random.default_rng(0)
    departments = rng.integers(N_LABELS, size=2000)
    return [" ".join(rng.permutation(FINDINGS[one].split())[:LENGTH]) for one in departments]


def own_reports(partition: int, differ: str) -> tuple[list[str], np.ndarray]:
    """Return a site's reports and labels: by the first finding, or as the sites differ."""
    rng = np.random.default_rng([1, partition])
    departments = rng.integers(N_LABELS, size=(140, LENGTH))
    texts = [" ".join(rng.choice(FINDINGS[one].split()) for one in row) for row in departments]
    if differ == "labels":  # every site numbers the departments in its own way
        return texts, np.random.default_rng(partition).permutation(N_LABELS)[departments[:, 0]]
    return texts, departments[:, -(partition % 2)]  # at odd sites the last finding is the main one


def load_data(context: Context) -> tuple[DataLoader, DataLoader]:
    """Return a node's data, to train with and to test with. For data of your own, change this."""
    if path := context.node_config.get("data"):
        with open(str(path), encoding="utf-8") as file:
            pairs = [line.split("\t", 1) for line in file]
        texts, labels = [text for _, text in pairs], [int(label) for label, _ in pairs]
    else:
        texts, labels = own_reports(Member(context).partition, str(context.run_config["differ"]))
    X, y = to_tokens(texts), torch.tensor(labels)
    n = len(y) * 3 // 10
    train, test = TensorDataset(X[:n], y[:n]), TensorDataset(X[n:], y[n:])
    return DataLoader(train, batch_size=50), DataLoader(test, batch_size=len(test))
