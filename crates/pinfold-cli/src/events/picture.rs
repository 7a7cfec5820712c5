//! The matrix of `pinfold events` as a picture (SVG): a row for each change, a column for each kind of memory. A cell
//! has its verdict as a word and is darker the worse it is, so that it can be read without colours.

use super::{Judgement, Report, worst};
use crate::change::Backing;

const TITLE_HEIGHT: usize = 62;
const ROW_HEIGHT: usize = 19;
/// Where the columns begin, and how wide each is.
const NAMES_WIDTH: usize = 420;
const COLUMN_WIDTH: usize = 76;
const MARGIN: usize = 12;

/// The picture's text.
pub(super) fn picture(report: &Report) -> String {
    let rows = names(report);
    let width = NAMES_WIDTH + Backing::ALL.len() * COLUMN_WIDTH + MARGIN;
    let height = TITLE_HEIGHT + rows.len() * ROW_HEIGHT + MARGIN;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    text += &format!(
        "<text x=\"{MARGIN}\" y=\"24\" font-size=\"16\">What becomes of a cached buffer: monitor {}, registrar {}</text>\n",
        report.monitor, report.registrar
    );
    for (place, backing) in Backing::ALL.into_iter().enumerate() {
        let middle = column(place) + COLUMN_WIDTH / 2;
        text += &centred(middle, TITLE_HEIGHT - 6, "black", backing.short_name());
    }
    for (place, name) in rows.into_iter().enumerate() {
        text += &row(report, name, TITLE_HEIGHT + place * ROW_HEIGHT);
    }
    text + "</svg>\n"
}

/// Each change once, in the order of the report.
fn names(report: &Report) -> Vec<&'static str> {
    let mut names = Vec::new();
    for event in &report.events {
        if !names.contains(&event.event) {
            names.push(event.event);
        }
    }
    names
}

fn column(place: usize) -> usize {
    NAMES_WIDTH + place * COLUMN_WIDTH
}

fn row(report: &Report, name: &str, top: usize) -> String {
    let base = top + ROW_HEIGHT - 5;
    let mut text = format!("<text x=\"{MARGIN}\" y=\"{base}\">{name}</text>\n");
    for (place, backing) in Backing::ALL.into_iter().enumerate() {
        let Some(judgement) = worst(report, name, backing.name()) else { continue };
        let (left, (ground, ink)) = (column(place), colours(judgement));
        text += &format!(
            "<rect x=\"{left}\" y=\"{top}\" width=\"{}\" height=\"{}\" fill=\"{ground}\" stroke=\"#bbb\"/>\n",
            COLUMN_WIDTH - 2,
            ROW_HEIGHT - 2
        );
        text += &centred(left + COLUMN_WIDTH / 2 - 1, base, ink, judgement.name());
    }
    text
}

fn centred(middle: usize, base: usize, ink: &str, word: &str) -> String {
    format!(
        "<text x=\"{middle}\" y=\"{base}\" text-anchor=\"middle\" fill=\"{ink}\">{word}</text>\n"
    )
}

/// The ground of a cell and the ink on it.
fn colours(judgement: Judgement) -> (&'static str, &'static str) {
    match judgement {
        Judgement::Fresh => ("#d5efd0", "black"),
        Judgement::Uncached => ("white", "#555"),
        Judgement::Skipped => ("white", "#999"),
        Judgement::Blind => ("#e08a1e", "black"),
        Judgement::Stale => ("#8b0000", "white"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Event, Report};
    use super::*;
    use crate::change::Mutation;

    fn report(events: &[(&'static str, Judgement)]) -> Report {
        let event = |&(event, verdict)| {
            let (mapping, direction) = (Backing::ALL[0].name(), "both");
            Event { event, mapping, direction, verdict, note: None }
        };
        let events = events.iter().map(event).collect();
        let [fresh, uncached, blind, stale, skipped] = [0; 5];
        let (monitor, registrar, cache) = ("m", "r", "c");
        Report { monitor, registrar, cache, fresh, uncached, blind, stale, skipped, events }
    }

    #[test]
    fn a_change_is_one_row_and_its_worst_verdict_one_cell() {
        let text = picture(&report(&[
            ("munmap", Judgement::Fresh),
            ("munmap", Judgement::Stale),
            ("brk", Judgement::Uncached),
        ]));
        assert_eq!(text.matches(">munmap</text>").count(), 1, "{text}");
        assert_eq!(text.matches(" stroke=").count(), 2, "{text}");
        assert!(text.contains(">STALE<") && text.contains(">uncached<"), "{text}");
        assert!(!text.contains(">fresh<"), "{text}");
    }

    #[test]
    fn no_name_is_markup() {
        let names = Mutation::ALL.iter().map(|it| it.name());
        let names = names.chain(Backing::ALL.iter().map(|it| it.short_name()));
        let marked: Vec<_> = names.filter(|name| name.contains(['<', '>', '&'])).collect();
        assert!(marked.is_empty(), "{marked:?}");
    }
}
