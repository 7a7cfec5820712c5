//! A time by length: a few measured points, straight lines between them.

/// The lengths at which times are measured, in bytes: 256 and four times as much over and over.
pub(super) const LENGTHS: [usize; 11] = {
    let mut lengths = [256; 11];
    let mut at = 1;
    while at < lengths.len() {
        lengths[at] = lengths[at - 1] * 4;
        at += 1;
    }
    lengths
};

/// One divided by the distance of each length to the next, which is three times the length itself.
#[allow(clippy::cast_precision_loss)] // small powers of two
const OVER_DISTANCE: [f64; LENGTHS.len()] = {
    let mut inverse = [0.0; LENGTHS.len()];
    let mut at = 0;
    while at < inverse.len() {
        inverse[at] = 1.0 / (3 * LENGTHS[at]) as f64;
        at += 1;
    }
    inverse
};

/// What something costs for a transfer of a length, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Curve {
    ns: [f64; LENGTHS.len()],
    /// How many points there are, at least 1.
    known: usize,
}

impl Curve {
    /// The curve through the times of the shortest lengths: 256 bytes, 1 KiB, 4 KiB and so on up to
    /// 256 MiB, in nanoseconds. `None` without a time, or if one is no time.
    pub fn through(ns: &[f64]) -> Option<Self> {
        let known = ns.len().min(LENGTHS.len());
        let sensible = ns.iter().all(|each| each.is_finite() && *each >= 0.0);
        let mut points = [0.0; LENGTHS.len()];
        points[..known].copy_from_slice(&ns[..known]);
        (known > 0 && sensible).then_some(Self { ns: points, known })
    }

    /// The time for `bytes` bytes, in nanoseconds: a straight line between the two points around it.
    /// Below the first point it is that point's, beyond the last it goes on as between the last two.
    pub fn at(&self, bytes: usize) -> f64 {
        self.at_spot(&Spot::of(bytes))
    }

    /// The same, for one who asks several curves about one length.
    #[inline(always)]
    pub(super) fn at_spot(&self, spot: &Spot) -> f64 {
        let next = spot.low + 1;
        if next >= self.known {
            return self.beyond(spot.bytes);
        }
        self.ns[spot.low] + (self.ns[next] - self.ns[spot.low]) * spot.fraction
    }

    /// As [`at`](Self::at), from the last point on.
    #[cold]
    fn beyond(&self, bytes: usize) -> f64 {
        let last = self.known - 1;
        if last == 0 || bytes <= LENGTHS[last] {
            return self.ns[last];
        }
        let before = last - 1;
        // A last segment that falls, by noise, does not make longer transfers free.
        let rise = (self.ns[last] - self.ns[before]).max(0.0);
        self.ns[before] + rise * fraction(bytes, before)
    }

    /// The points.
    pub(super) fn points(&self) -> &[f64] {
        &self.ns[..self.known]
    }
}

/// Where a length lies among [`LENGTHS`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Spot {
    bytes: usize,
    /// The number of the point below.
    low: usize,
    /// How far it is from there to the next point: 0 there, 1 at the next.
    fraction: f64,
}

impl Spot {
    #[inline]
    pub(super) fn of(bytes: usize) -> Self {
        let bytes = bytes.max(LENGTHS[0]);
        // Four times as long is two more bits; the first point has 8.
        let low = (bytes.ilog2() as usize / 2 - 4).min(LENGTHS.len() - 1);
        Self { bytes, low, fraction: fraction(bytes, low) }
    }
}

/// How far `bytes` is from the length of number `low`, in distances to the next.
#[inline]
#[allow(clippy::cast_precision_loss)] // lengths below 2^53
fn fraction(bytes: usize, low: usize) -> f64 {
    (bytes - LENGTHS[low]) as f64 * OVER_DISTANCE[low]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn curve(ns: &[f64]) -> Curve {
        Curve::through(ns).unwrap()
    }

    /// The points as pairs, searched one by one.
    #[allow(clippy::cast_precision_loss)]
    fn naive(ns: &[f64], bytes: usize) -> f64 {
        if bytes <= LENGTHS[0] || ns.len() == 1 {
            return ns[0];
        }
        let segment = (1..ns.len()).find(|&at| bytes <= LENGTHS[at]).unwrap_or(ns.len() - 1);
        let (x0, x1) = (LENGTHS[segment - 1] as f64, LENGTHS[segment] as f64);
        let slope = (ns[segment] - ns[segment - 1]) / (x1 - x0);
        let slope = if bytes > LENGTHS[segment] { slope.max(0.0) } else { slope };
        ns[segment - 1] + slope * (bytes as f64 - x0)
    }

    #[test]
    fn the_lengths_are_those_that_are_promised() {
        assert_eq!((LENGTHS[0], LENGTHS[2], LENGTHS[10]), (256, 4096, 256 << 20));
    }

    #[test]
    fn what_is_no_time_makes_no_curve() {
        assert_eq!(Curve::through(&[]), None);
        assert_eq!(Curve::through(&[1.0, f64::NAN]), None);
        assert_eq!(Curve::through(&[1.0, -1.0]), None);
    }

    proptest! {
        #[test]
        fn it_is_the_line_between_the_neighbours(
            ns in proptest::collection::vec(0.0..1e9_f64, 1..12),
            bytes in 0_usize..1 << 32,
        ) {
            let (fast, slow) = (curve(&ns).at(bytes), naive(&ns, bytes));
            prop_assert!((fast - slow).abs() <= 1e-6 * slow.abs().max(1.0), "{fast} {slow}");
        }

        #[test]
        fn it_goes_through_its_points(ns in proptest::collection::vec(0.0..1e9_f64, 1..12)) {
            for (&bytes, &time) in LENGTHS.iter().zip(&ns) {
                prop_assert!((curve(&ns).at(bytes) - time).abs() <= 1e-6 * time.max(1.0));
            }
        }
    }
}
