"""What a machine does, measured piece by piece: kernels, launches, collectives, contention; and its links."""
