//! Lines over a logarithmic axis, as a picture that any browser shows (SVG).

use crate::output::Failure;
use plotters::prelude::*;
use std::error::Error;
use std::ops::Range;
use std::path::Path;

/// Width and height in pixels.
const SIZE: (u32, u32) = (960, 600);

/// The room for the lines' names behind their ends, in pixels, and what each of them takes from top to bottom.
const NAMES_WIDTH: u32 = 260;
const NAME_HEIGHT: i32 = 15;

/// Each dark enough to be read on white.
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 0, 0),
    RGBColor(0, 98, 160),
    RGBColor(196, 78, 0),
    RGBColor(0, 112, 80),
    RGBColor(150, 60, 130),
    RGBColor(110, 110, 110),
];

/// A name at its line's end: how far down, how far right, the name and its colour.
type Name<'n> = (i32, i32, &'n str, RGBAColor);

/// Moves names down that would cover the one above; what is then too low moves all of them up.
fn apart(mut names: Vec<Name<'_>>) -> Vec<Name<'_>> {
    names.sort_by_key(|name| name.0);
    let lowest = i32::try_from(SIZE.1).unwrap_or(i32::MAX) - NAME_HEIGHT;
    let mut free = i32::MIN;
    for name in &mut names {
        name.0 = name.0.max(free);
        free = name.0 + NAME_HEIGHT;
    }
    let mut below = lowest;
    for name in names.iter_mut().rev() {
        name.0 = name.0.min(below);
        below = name.0 - NAME_HEIGHT;
    }
    let right = names.iter().map(|name| name.1).max().unwrap_or(0);
    names.iter_mut().for_each(|name| name.1 = right);
    names
}

/// Writes a picture's text to a file.
///
/// # Errors
///
/// [`Failure`] if the file cannot be written.
pub(crate) fn write(file: &Path, picture: &str) -> Result<(), Failure> {
    std::fs::write(file, picture)
        .map_err(|error| Failure::usage(format!("cannot write {}: {error}", file.display())))
}

/// A picture of several lines over one logarithmic axis.
#[derive(Clone, Debug)]
pub struct Plot {
    /// What it shows.
    pub title: String,
    /// What runs from left to right, and how its values are written.
    pub across: Axis,
    /// What runs from bottom to top.
    pub up: Axis,
    /// The lines; points that are not above zero cannot be shown and are left out.
    pub lines: Vec<Line>,
}

/// One logarithmic axis.
#[derive(Clone, Copy, Debug)]
pub struct Axis {
    /// What it measures, with the unit.
    pub title: &'static str,
    /// The lines of the grid stand at powers of this.
    pub base: f64,
    /// How a value of it is written.
    pub label: fn(f64) -> String,
}

/// One line.
#[derive(Clone, Debug)]
pub struct Line {
    /// What stands at its end.
    pub name: String,
    /// From left to right.
    pub points: Vec<(f64, f64)>,
}

impl Line {
    fn shown(&self) -> impl Iterator<Item = (f64, f64)> + Clone + '_ {
        self.points.iter().copied().filter(|&(x, y)| x > 0.0 && y > 0.0 && (x * y).is_finite())
    }
}

impl Plot {
    /// Writes the picture to a file.
    ///
    /// # Errors
    ///
    /// [`Failure`] if there is nothing to show or the file cannot be written.
    pub fn write(&self, file: &Path) -> Result<(), Failure> {
        write(file, &self.picture()?)
    }

    /// The picture's text.
    fn picture(&self) -> Result<String, Failure> {
        let mut text = String::new();
        let drawn = self.draw(&SVGBackend::with_string(&mut text, SIZE).into_drawing_area());
        drawn.map_err(|error| Failure::usage(format!("the plot cannot be drawn: {error}")))?;
        Ok(text)
    }

    fn draw(
        &self,
        area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    ) -> Result<(), Box<dyn Error>> {
        area.fill(&WHITE)?;
        let across = self.span(|point| point.0)?.log_scale().base(self.across.base);
        let up = self.span(|point| point.1)?.log_scale().base(self.up.base);
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, ("sans-serif", 20))
            .margin(16)
            .margin_right(NAMES_WIDTH)
            .x_label_area_size(48)
            .y_label_area_size(72)
            .build_cartesian_2d(across, up)?;
        chart
            .configure_mesh()
            .x_desc(self.across.title)
            .y_desc(self.up.title)
            .x_label_formatter(&|value| (self.across.label)(*value))
            .y_label_formatter(&|value| (self.up.label)(*value))
            .light_line_style(WHITE)
            .label_style(("sans-serif", 13))
            .axis_desc_style(("sans-serif", 14))
            .draw()?;
        let mut names = vec![];
        for (place, line) in self.lines.iter().enumerate() {
            let style = COLOURS[place % COLOURS.len()].stroke_width(2);
            // Solid and dashed by turns, for readers without colours.
            if place % 2 == 0 {
                chart.draw_series(LineSeries::new(line.shown(), style).point_size(3))?;
            } else {
                chart.draw_series(DashedLineSeries::new(line.shown(), 6, 4, style))?;
                chart.draw_series(line.shown().map(|point| Circle::new(point, 3, style)))?;
            }
            let end = line.shown().last().map(|point| chart.backend_coord(&point));
            names.extend(end.map(|(x, y)| (y, x, line.name.as_str(), style.color)));
        }
        for (y, x, name, color) in apart(names) {
            // In black, behind a piece of the line.
            area.draw(&PathElement::new([(x + 6, y), (x + 18, y)], color.stroke_width(3)))?;
            area.draw(&Text::new(name.to_string(), (x + 22, y - 6), ("sans-serif", 14)))?;
        }
        area.present()?;
        Ok(())
    }

    /// From the least to the greatest, with a little room, because a range of no length has no scale.
    fn span(&self, part: impl Fn((f64, f64)) -> f64) -> Result<Range<f64>, &'static str> {
        let values = self.lines.iter().flat_map(Line::shown).map(part);
        let (least, greatest) = values
            .fold((f64::INFINITY, 0.0_f64), |(low, high), value| (low.min(value), high.max(value)));
        if least > greatest {
            return Err("it has no point above zero");
        }
        Ok(least / 1.1..greatest * 1.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(lines: &[(&str, &[(f64, f64)])]) -> Plot {
        let axis = Axis { title: "bytes", base: 10.0, label: |value| format!("{value:.0}") };
        let lines =
            lines.iter().map(|&(name, points)| Line { name: name.into(), points: points.into() });
        Plot { title: "a <plot>".into(), across: axis, up: axis, lines: lines.collect() }
    }

    #[test]
    fn every_line_is_drawn_and_named() {
        let picture =
            plot(&[("one", &[(1.0, 2.0), (10.0, 20.0)]), ("two", &[(1.0, 3.0), (10.0, 3.0)])]);
        let text = picture.picture().unwrap();
        assert!(text.starts_with("<svg") && text.trim_end().ends_with("</svg>"), "{text}");
        assert!(text.contains("one") && text.contains("two") && text.contains("a &lt;plot&gt;"));
        assert!(text.matches("<polyline").count() >= 2, "{text}");
    }

    #[test]
    fn no_name_covers_another() {
        let black = BLACK.to_rgba();
        let names = [100, 590, 101, 599, 598].map(|y| (y, 7, "name", black));
        let placed: Vec<i32> = apart(names.to_vec()).iter().map(|name| name.0).collect();
        assert!(placed.windows(2).all(|two| two[1] - two[0] >= NAME_HEIGHT), "{placed:?}");
        assert!(placed.iter().all(|&y| (0..=600 - NAME_HEIGHT).contains(&y)), "{placed:?}");
    }

    #[test]
    fn one_point_is_enough() {
        plot(&[("one", &[(4096.0, 1.0)])]).picture().unwrap();
    }

    #[test]
    fn points_without_a_logarithm_are_left_out() {
        let text =
            plot(&[("one", &[(1.0, 0.0), (2.0, 5.0), (3.0, f64::INFINITY)])]).picture().unwrap();
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    }

    #[test]
    fn nothing_to_show_is_an_error() {
        assert!(plot(&[("one", &[(1.0, 0.0)])]).picture().is_err());
        assert!(plot(&[]).picture().is_err());
    }

    #[test]
    fn a_file_that_cannot_be_written_is_an_error() {
        let picture = plot(&[("one", &[(1.0, 1.0)])]);
        assert!(picture.write(Path::new("/nowhere/at/all.svg")).is_err());
    }
}
