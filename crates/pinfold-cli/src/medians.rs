//! Medians, of turns and of ratios within rounds.

/// The middle of `values`, the upper one of two; zero of none.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// The median over rounds of how many times faster `mine` was than `other`.
pub(crate) fn times_faster(mine: &[f64], other: &[f64]) -> f64 {
    median(mine.iter().zip(other).map(|(mine, other)| other / mine).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::float_cmp)] // the very values that went in
    fn the_middle_is_in_the_middle() {
        assert_eq!(median(vec![]), 0.0);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), 3.0);
        assert_eq!(times_faster(&[1.0, 1.0, 1.0], &[2.0, 4.0, 2.0]), 2.0);
    }
}
