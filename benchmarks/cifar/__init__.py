"""SGD, K-FAC into SGD and KFACAdamW on CIFAR-10."""
