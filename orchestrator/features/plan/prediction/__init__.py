"""What a training step takes on devices that are not here: times, errors against published runs, goodput. No torch."""
