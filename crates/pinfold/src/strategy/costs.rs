//! What each way costs on this machine: curves, kept in a file.

use super::curve::{Curve, Spot};
use super::{Strategy, Uses};
use crate::landing::{Measured, Method};
use crate::stored;
use std::fmt::Write;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// What one way costs: the first time that memory is used, and each further time.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Way {
    /// Memory that was never registered; giving a registration back is counted as well.
    pub first: Curve,
    /// The same memory again.
    pub again: Curve,
}

impl Way {
    /// What one of `uses` transfers of `bytes` bytes costs on average, in nanoseconds.
    pub fn of_each(&self, bytes: usize, uses: Uses) -> f64 {
        self.of_each_at(&Spot::of(bytes), uses)
    }

    #[inline(always)]
    pub(super) fn of_each_at(&self, spot: &Spot, uses: Uses) -> f64 {
        match uses {
            Uses::ONCE => self.first.at_spot(spot),
            Uses::Times(times) => {
                let (first, times) = (self.first.at_spot(spot), f64::from(times.get()));
                (first + (times - 1.0) * self.again.at_spot(spot)) / times
            }
            Uses::Often => self.again.at_spot(spot),
        }
    }
}

/// What transfers cost by each way, the transfer itself included if it was measured with a device at
/// work.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct Costs {
    /// A lease of a registration that is kept.
    pub cached: Option<Way>,
    /// A copy through a pool's buffer.
    pub copy: Option<Way>,
    /// A registration for one use.
    pub per_use: Option<Way>,
    /// Pieces that move while others are being registered; cached afterwards.
    pub pieces: Option<Way>,
    /// Pages that change places, for data that arrives.
    pub exchange: Option<Way>,
}

/// Why costs could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CostsError {
    /// The file could not be read or written.
    #[error("{0}: {1}")]
    File(PathBuf, #[source] io::Error),
    /// The file holds something else, or was measured on another kernel or machine.
    #[error("{0} was not measured on this machine: measure again (`pinfold bench strategies`)")]
    Stale(PathBuf),
}

/// The first word of a file.
const FORMAT: &str = "pinfold-strategy-2";

/// The last line: a file that lacks it was cut off.
const END: &str = "end";

impl Costs {
    /// Nothing is known, so nothing is compared.
    pub const UNMEASURED: Self =
        Self { cached: None, copy: None, per_use: None, pieces: None, exchange: None };

    /// The name under which `pinfold bench strategies` stores what transfers by `device` cost in a
    /// cache with this monitor (its [`name`](crate::Monitor::name)): what [`stored`](Self::stored)
    /// is asked for.
    pub fn name(device: &str, monitor: &str) -> String {
        format!("{device}-{monitor}")
    }

    /// What is known of `strategy`.
    pub fn of(&self, strategy: Strategy) -> Option<&Way> {
        match strategy {
            Strategy::Cached | Strategy::OnDemand => self.cached.as_ref(),
            Strategy::Copy | Strategy::Landing(Method::Copy) => self.copy.as_ref(),
            Strategy::PerUse => self.per_use.as_ref(),
            Strategy::Pieces => self.pieces.as_ref(),
            Strategy::Landing(_) => self.exchange.as_ref(),
        }
    }

    /// With what [`Crossover::measure`](crate::landing::Crossover::measure) found out: an exchange costs
    /// a transfer to memory that is registered, and itself with the registration that follows.
    #[must_use]
    #[allow(clippy::cast_precision_loss)] // below 2^53 ns, which are 104 days
    pub fn with_exchange(self, measured: &[Measured]) -> Self {
        let Some(cached) = self.cached else { return self };
        let time = |bytes: usize| {
            let longest = measured.iter().rfind(|each| each.bytes <= bytes);
            let exchange = longest.or(measured.first())?;
            Some((exchange.exchange + exchange.exchange_refill).as_nanos() as f64)
        };
        let measured_up_to = measured.last().map_or(0, |each| each.bytes);
        let lengths = super::curve::LENGTHS.iter().take_while(|&&bytes| bytes <= measured_up_to);
        let sum = |&bytes: &usize| Some(time(bytes)? + cached.again.at(bytes));
        let times: Option<Vec<f64>> = lengths.map(sum).collect();
        let curve = times.and_then(|times| Curve::through(&times));
        Self { exchange: curve.map(|curve| Way { first: curve, again: curve }), ..self }
    }

    /// What is known of this machine under `name`: what [`default_file`](Self::default_file) holds,
    /// else nothing.
    pub fn stored(name: &str) -> Self {
        let file = Self::default_file(name);
        file.and_then(|file| Self::load(&file).ok()).unwrap_or(Self::UNMEASURED)
    }

    /// Where costs are kept: `pinfold/strategy-NAME` in the user's cache directory
    /// (`XDG_CACHE_HOME`, else `.cache` at home). `name` tells devices and monitors apart. `None`
    /// without a home.
    pub fn default_file(name: &str) -> Option<PathBuf> {
        stored::file(&format!("strategy-{name}"))
    }

    /// Reads what [`store`](Self::store) has written on this machine under this kernel.
    ///
    /// # Errors
    ///
    /// [`CostsError`].
    pub fn load(path: &Path) -> Result<Self, CostsError> {
        let text =
            fs::read_to_string(path).map_err(|error| CostsError::File(path.to_owned(), error))?;
        Self::parse(&text, &stored::machine()).ok_or_else(|| CostsError::Stale(path.to_owned()))
    }

    /// Writes them down, for this machine and kernel. A concurrent reader finds the old
    /// file or the new one.
    ///
    /// # Errors
    ///
    /// [`CostsError::File`].
    pub fn store(&self, path: &Path) -> Result<(), CostsError> {
        stored::write(path, &self.text(&stored::machine()))
            .map_err(|error| CostsError::File(path.to_owned(), error))
    }

    /// Each way with its name in a file.
    fn named(&mut self) -> [(&'static str, &mut Option<Way>); 5] {
        [
            ("cached", &mut self.cached),
            ("copy", &mut self.copy),
            ("per-use", &mut self.per_use),
            ("pieces", &mut self.pieces),
            ("exchange", &mut self.exchange),
        ]
    }

    fn text(&self, machine: &str) -> String {
        let mut text = format!("{FORMAT}\n{machine}\n");
        let mut costs = *self;
        for (name, way) in costs.named() {
            for (when, curve) in
                way.iter().flat_map(|way| [("first", way.first), ("again", way.again)])
            {
                let points: String =
                    curve.points().iter().fold(String::new(), |mut text, point| {
                        // Writing to a string does not fail.
                        let _ = write!(text, " {point:.1}");
                        text
                    });
                text += &format!("{name} {when}{points}\n");
            }
        }
        text + END + "\n"
    }

    fn parse(text: &str, machine: &str) -> Option<Self> {
        let mut lines = text.lines();
        let known = lines.next() == Some(FORMAT) && lines.next() == Some(machine);
        let lines: Vec<&str> = lines.collect();
        let whole = lines.last() == Some(&END) && text.ends_with('\n');
        let curve = |name: &str, when: &str| {
            let words = lines.iter().map(|line| line.split(' '));
            let mut line = words
                .filter(|words| words.clone().take(2).eq([name, when]))
                .map(|words| words.skip(2).map(str::parse).collect::<Result<Vec<f64>, _>>());
            Curve::through(&line.next()?.ok()?)
        };
        let mut costs = Self::UNMEASURED;
        for (name, way) in costs.named() {
            *way = curve(name, "first")
                .zip(curve(name, "again"))
                .map(|(first, again)| Way { first, again });
        }
        (known && whole && costs != Self::UNMEASURED).then_some(costs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroU32;
    use std::time::Duration;

    fn way(first: &[f64], again: &[f64]) -> Option<Way> {
        Some(Way { first: Curve::through(first)?, again: Curve::through(again)? })
    }

    fn some() -> Costs {
        Costs {
            cached: way(&[900.0, 1000.0], &[10.5, 20.0]),
            copy: way(&[5.0, 20.0, 80.0], &[5.0, 10.0, 40.0]),
            ..Costs::UNMEASURED
        }
    }

    #[test]
    fn what_was_written_down_holds_on_the_same_machine_only() {
        let text = some().text("6.18 a processor");
        assert_eq!(Costs::parse(&text, "6.18 a processor"), Some(some()));
        assert_eq!(Costs::parse(&text, "6.19 a processor"), None);
        assert_eq!(Costs::parse("", ""), None);
        for cut in 0..text.len() {
            assert_eq!(Costs::parse(&text[..cut], "6.18 a processor"), None, "{cut}");
        }
        let bad = text.replace("900.0", "x").replace("80.0", "-1");
        assert_eq!(Costs::parse(&bad, "6.18 a processor"), None);
    }

    #[test]
    fn the_first_use_is_shared_by_all() {
        let way = way(&[100.0], &[10.0]).unwrap();
        let times = |n| Uses::Times(NonZeroU32::new(n).unwrap());
        let each = [times(1), times(2), times(10), Uses::Often].map(|uses| way.of_each(1, uses));
        assert_eq!(each.map(f64::to_bits), [100.0, 55.0, 19.0, 10.0].map(f64::to_bits));
    }

    #[test]
    fn an_exchange_costs_its_transfer_and_what_follows() {
        let nothing = Duration::ZERO;
        let measured = |bytes, exchange| Measured {
            bytes,
            copy: nothing,
            exchange: Duration::from_nanos(exchange),
            exchange_refill: Duration::from_nanos(1),
            replace: nothing,
            replace_refill: nothing,
        };
        let costs = some().with_exchange(&[measured(256, 99), measured(1024, 199)]);
        let exchange = costs.exchange.unwrap();
        assert_eq!(
            [256, 1024].map(|bytes| exchange.first.at(bytes).to_bits()),
            [110.5, 220.0].map(f64::to_bits)
        );
        assert_eq!(some().with_exchange(&[]).exchange, None);
    }
}
