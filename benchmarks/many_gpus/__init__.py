"""What can only be said on several GPUs: exactness on NCCL, collectives, step times on every mesh, training speed."""
