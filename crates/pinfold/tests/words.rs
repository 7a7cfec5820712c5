//! The subject of a sentence is a thing in the system (a thread, the cache, the kernel): no text and no name uses a
//! pronoun in its place.

#![allow(clippy::unwrap_used)] // helpers fail as loudly as tests

mod workspace;

use std::fs;
use workspace::{crates, sources, texts};

/// Each in two parts, because this file is read as well.
const PRONOUNS: [[&str; 2]; 5] =
    [["who", "ever"], ["no", "body"], ["some", "body"], ["any", "body"], ["every", "body"]];
/// Those that stand in other words, too, and count only by themselves.
const SHORT: [[&str; 2]; 4] = [["h", "e"], ["h", "im"], ["h", "is"], ["hims", "elf"]];

/// The pronoun that a line uses, also as a part of a name.
fn pronoun(line: &str) -> Option<String> {
    let line = line.to_lowercase();
    let words: Vec<_> = line.split(|c: char| !c.is_alphabetic()).collect();
    let anywhere = PRONOUNS.iter().map(|word| word.concat()).find(|word| line.contains(word));
    let alone = || SHORT.iter().map(|word| word.concat()).find(|word| words.contains(&&**word));
    anywhere.or_else(alone)
}

#[test]
fn every_sentence_names_a_thing_in_the_system() {
    let texts = texts();
    assert!(texts.len() > 300, "the workspace has more texts than {}", texts.len());
    let mut found = Vec::new();
    for file in texts {
        for (number, line) in fs::read_to_string(&file).unwrap().lines().enumerate() {
            found.extend(pronoun(line).map(|word| (file.clone(), number + 1, word)));
        }
    }
    assert!(found.is_empty(), "name the thread, process or part that acts: {found:#?}");
}

#[test]
fn a_pronoun_is_recognised() {
    for word in PRONOUNS.iter().chain(&SHORT).map(|word| word.concat()) {
        assert_eq!(pronoun(&format!("/// So {word} waits.")).as_ref(), Some(&word));
        assert_eq!(pronoun(&format!("fn {word}_waits() {{}}")).as_ref(), Some(&word));
    }
    let capital = format!("struct {}Knows;", PRONOUNS[0].concat().to_uppercase());
    assert_eq!(pronoun(&capital), Some(PRONOUNS[0].concat()));
    assert_eq!(pronoun("/// The cache then finds the history of this thread."), None);
}

/// The texts of the errors that `thiserror` derives, without the names of their arguments.
fn error_texts(code: &str) -> Vec<String> {
    let text = |rest: &str| {
        let rest = rest.trim_start().strip_prefix('"')?;
        let end = rest.match_indices('"').find(|&(at, _)| !rest[..at].ends_with('\\'))?.0;
        let lines = rest[..end].split("\\\n").map(str::trim_start).collect::<Vec<_>>();
        Some(lines.concat())
    };
    code.split("#[error(").skip(1).filter_map(text).collect()
}

/// What the arguments add is counted where it is bounded: in `pinfold-core`, whose texts are no literals of this kind.
#[test]
fn every_error_text_is_shorter_than_200_characters() {
    let files: Vec<_> = crates().iter().flat_map(|(_, root)| sources(root)).collect();
    let texts: Vec<_> =
        files.iter().flat_map(|file| error_texts(&fs::read_to_string(file).unwrap())).collect();
    assert!(texts.len() > 150, "the workspace has more errors than {}", texts.len());
    let long: Vec<_> = texts.iter().filter(|text| text.chars().count() >= 200).collect();
    assert!(
        long.is_empty(),
        "say what failed, the limit and what to do, the rest in the book: {long:#?}"
    );
}

#[test]
fn an_error_text_is_read_whole() {
    let code =
        "#[error(transparent)]\nA,\n#[error(\n    \"a \\\"b\\\" \\\n     c {0}\",\n    x\n)]\nB,";
    assert_eq!(error_texts(code), ["a \\\"b\\\" c {0}"]);
}
