//! How subcommands print: data to stdout, talk to stderr.
//!
//! Names and paths come from programs that nobody trusts, so in tables every control character is escaped; with
//! `--json` the JSON does it. A reader that hangs up (`| head`) ends a command quietly.

use crate::{
    doors::control::ClientError,
    effect::path::is_hostile,
    ledger,
    policy::fault::{Fault, PolicyError},
};
use serde::Serialize;
use std::{
    error::Error,
    fmt,
    io::{self, Write},
    process::ExitCode,
};

/// Why a subcommand failed, as `main` tells it.
#[derive(Debug)]
pub struct Failure {
    /// What failed, on which object. Of one line.
    pub message: String,
    /// More of it, a line each.
    pub lines: Vec<String>,
    /// Causes, outermost first.
    pub causes: Vec<String>,
    /// What to do; may be empty.
    pub hint: String,
    /// The exit status.
    pub status: u8,
    /// Nothing is to be printed: the reader of our output hung up.
    pub quiet: Quiet,
}

/// Whether a failure is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quiet {
    /// It is.
    Told,
    /// It is not, and the status is 0.
    HungUp,
}

impl Failure {
    /// A failure with the exit status 1.
    pub fn new(message: impl Into<String>, hint: impl Into<String>) -> Failure {
        let (message, hint) = (message.into(), hint.into());
        Failure { message, lines: Vec::new(), causes: Vec::new(), hint, status: 1, quiet: Quiet::Told }
    }

    /// The same with the causes of this error.
    pub fn because(mut self, error: &(dyn Error + 'static)) -> Failure {
        let mut next = Some(error);
        while let Some(cause) = next {
            self.causes.push(cause.to_string());
            next = cause.source();
        }
        self
    }

    /// Prints it to stderr, and gives the exit status.
    pub fn report(&self) -> ExitCode {
        match self.quiet {
            Quiet::HungUp => ExitCode::SUCCESS,
            Quiet::Told => {
                // With stderr closed there is nobody to tell.
                let _ = io::stderr().write_all(self.to_string().as_bytes());
                ExitCode::from(self.status)
            }
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "error: {}", escape(&self.message))?;
        for line in &self.lines {
            writeln!(f, "{}", escape(line))?;
        }
        for cause in &self.causes {
            writeln!(f, "  caused by: {}", escape(cause))?;
        }
        match self.hint.as_str() {
            "" => Ok(()),
            hint => writeln!(f, "hint: {}", escape(hint)),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(cause: io::Error) -> Failure {
        if cause.kind() == io::ErrorKind::BrokenPipe {
            return Failure { quiet: Quiet::HungUp, status: 0, ..Failure::new("", "") };
        }
        Failure::new("cannot write the output", "check where stdout leads").because(&cause)
    }
}

impl From<ledger::Error> for Failure {
    fn from(cause: ledger::Error) -> Failure {
        let failure = Failure::new(cause.to_string(), "");
        match cause.source() {
            Some(source) => failure.because(source),
            None => failure,
        }
    }
}

impl From<&PolicyError> for Failure {
    /// A file's faults keep their lines, of which each is escaped: only ours are ends of lines.
    fn from(cause: &PolicyError) -> Failure {
        let PolicyError::Faults(faults) = cause else { return Failure::new(cause.to_string(), cause.hint()) };
        let mut lines = faults.iter().flat_map(|fault| {
            // A file's name may hold anything, the end of a line too.
            let fault = Fault { file: escape(&fault.file), ..fault.clone() };
            fault.to_string().lines().map(str::to_owned).collect::<Vec<_>>()
        });
        let first = lines.next().unwrap_or_else(|| "the policy cannot be used".to_owned());
        Failure { lines: lines.collect(), ..Failure::new(first, cause.hint()) }
    }
}

impl Failure {
    /// The run's supervisor could not be asked.
    pub fn control(run: &str, cause: &ClientError) -> Failure {
        Failure::new(format!("cannot reach run {run}"), "`tollgate ps --all` shows where it stands").because(cause)
    }
}

/// Prints one object on one line.
///
/// # Errors
/// As write(2).
pub fn json_line(out: &mut dyn Write, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    out.write_all(&line)
}

/// Rows in aligned columns under a header, printed as they come: the first rows are held back to see how wide the
/// columns are, so that a list of millions takes no more memory than a short one. The last column is not padded.
pub struct Table<'a, const N: usize> {
    out: &'a mut dyn Write,
    widths: [usize; N],
    held: Vec<([String; N], String)>,
    decided: Widths,
}

#[derive(PartialEq, Eq)]
enum Widths {
    Growing,
    Fixed,
}

/// How many rows are held back.
const HELD: usize = 500;

impl<'a, const N: usize> Table<'a, N> {
    /// A table with these headings.
    pub fn new(out: &'a mut dyn Write, headings: [&str; N]) -> Table<'a, N> {
        let headings = headings.map(str::to_owned);
        let widths = std::array::from_fn(|column| headings[column].chars().count());
        Table { out, widths, held: vec![(headings, String::new())], decided: Widths::Growing }
    }

    /// Prints a table of these rows.
    ///
    /// # Errors
    /// As write(2).
    pub fn print_all(
        out: &'a mut dyn Write,
        headings: [&str; N],
        rows: impl IntoIterator<Item = [String; N]>,
    ) -> io::Result<()> {
        let mut table = Table::new(out, headings);
        rows.into_iter().try_for_each(|row| table.row(row))?;
        table.finish()
    }

    /// Adds a row.
    ///
    /// # Errors
    /// As write(2).
    pub fn row(&mut self, cells: [String; N]) -> io::Result<()> {
        self.row_with(cells, String::new())
    }

    /// Adds a row with a remark on a line of its own below it, unless that is empty.
    ///
    /// # Errors
    /// As write(2).
    pub fn row_with(&mut self, cells: [String; N], remark: String) -> io::Result<()> {
        if self.decided == Widths::Fixed {
            return self.print(&cells, &remark);
        }
        for (width, cell) in self.widths.iter_mut().zip(&cells) {
            *width = (*width).max(cell.chars().count());
        }
        self.held.push((cells, remark));
        if self.held.len() > HELD {
            self.release()?;
        }
        Ok(())
    }

    /// Where it prints to, for what is no row.
    pub fn out(&mut self) -> &mut dyn Write {
        self.out
    }

    /// Prints what is still held back.
    ///
    /// # Errors
    /// As write(2).
    pub fn finish(mut self) -> io::Result<()> {
        self.release()
    }

    fn release(&mut self) -> io::Result<()> {
        self.decided = Widths::Fixed;
        std::mem::take(&mut self.held).iter().try_for_each(|(cells, remark)| self.print(cells, remark))
    }

    fn print(&mut self, cells: &[String; N], remark: &str) -> io::Result<()> {
        let mut line = String::new();
        for (index, (cell, width)) in cells.iter().zip(self.widths).enumerate() {
            match index + 1 == N {
                true => line.push_str(cell),
                false => line.push_str(&format!("{cell:width$}  ")),
            }
        }
        writeln!(self.out, "{}", line.trim_end())?;
        match remark {
            "" => Ok(()),
            remark => writeln!(self.out, "    {remark}"),
        }
    }
}

/// A word of a closed list as it is written on the wire.
pub fn plain(word: &impl Serialize) -> String {
    serde_json::to_value(word).ok().and_then(|word| word.as_str().map(str::to_owned)).unwrap_or_default()
}

/// Text with what could steer a terminal, reorder a line or go unseen escaped; see [`is_hostile`].
pub fn escape(text: &str) -> String {
    if !text.contains(is_hostile) {
        return text.to_owned();
    }
    text.chars().fold(String::with_capacity(text.len() + 8), |mut escaped, c| {
        match is_hostile(c) {
            true => escaped.extend(c.escape_default()),
            false => escaped.push(c),
        }
        escaped
    })
}

/// At most this many characters of a text, the cut marked.
pub fn shorten(text: &str, width: usize) -> String {
    match text.char_indices().nth(width) {
        None => text.to_owned(),
        Some(_) => text.chars().take(width.saturating_sub(1)).chain(['…']).collect(),
    }
}

/// An argument vector as a shell would take it, for reading.
pub fn command_line(words: &[String]) -> String {
    let plain = |word: &str| !word.is_empty() && word.chars().all(|c| c.is_alphanumeric() || "-_./=:,+@%^".contains(c));
    let quoted = |word: &String| match plain(word) {
        true => word.clone(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    };
    escape(&words.iter().map(quoted).collect::<Vec<_>>().join(" "))
}

/// A number of bytes for reading.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut scaled = count as f64;
    let mut unit = "B";
    for next in UNITS {
        if scaled < 1024.0 {
            break;
        }
        (scaled, unit) = (scaled / 1024.0, next);
    }
    match unit {
        "B" => format!("{count} B"),
        unit => format!("{scaled:.1} {unit}"),
    }
}

/// A duration in microseconds for reading.
pub fn duration(us: u64) -> String {
    let seconds = us / 1_000_000;
    match seconds {
        0 if us < 1000 => format!("{us}us"),
        0 => format!("{}ms", us / 1000),
        1..=59 => format!("{seconds}.{}s", us / 100_000 % 10),
        60..=3599 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3600..=86_399 => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_aligned_and_has_no_trailing_space() {
        let mut out = Vec::new();
        let mut table = Table::new(&mut out, ["ID", "WHAT"]);
        table.row(["long-id", ""].map(str::to_owned)).expect("writes");
        table.row_with(["é", "x y"].map(str::to_owned), "why".to_owned()).expect("writes");
        table.finish().expect("writes");
        assert_eq!(String::from_utf8(out).expect("is text"), "ID       WHAT\nlong-id\né        x y\n    why\n");
    }

    #[test]
    fn a_long_table_is_printed_as_it_comes() {
        let mut out = Vec::new();
        let mut table = Table::new(&mut out, ["N", "X"]);
        for number in 0..HELD * 3 {
            table.row([number.to_string(), "x".to_owned()]).expect("writes");
            assert!(table.held.len() <= HELD);
        }
        table.finish().expect("writes");
        assert_eq!(String::from_utf8(out).expect("is text").lines().count(), HELD * 3 + 1);
    }

    #[test]
    fn a_hostile_name_cannot_speak_to_the_terminal() {
        assert_eq!(escape("a\x1b[2Jb\r\n\u{9b}\u{202e}c é"), "a\\u{1b}[2Jb\\r\\n\\u{9b}\\u{202e}c é");
        assert_eq!(escape("a\u{200b}\u{feff}\u{2060}\u{ad}b"), "a\\u{200b}\\u{feff}\\u{2060}\\u{ad}b");
        let words = ["sh", "-c", "echo 'hi'\n"].map(str::to_owned);
        assert_eq!(command_line(&words), "sh -c 'echo '\\''hi'\\''\\n'");
    }

    #[test]
    fn a_reader_that_hangs_up_is_no_failure() {
        let hung_up = Failure::from(io::Error::from(io::ErrorKind::BrokenPipe));
        assert_eq!((hung_up.quiet, hung_up.status), (Quiet::HungUp, 0));
        assert_eq!(Failure::from(io::Error::from(io::ErrorKind::StorageFull)).status, 1);
    }

    #[test]
    fn quantities_read_well() {
        let rows = [(5, "5us"), (5_000, "5ms"), (1_250_000, "1.2s"), (61_000_000, "1m01s"), (90_000_000_000, "1d01h")];
        for (us, text) in rows {
            assert_eq!(duration(us), text);
        }
        assert_eq!([bytes(1023), bytes(1024), bytes(5 << 30)], ["1023 B", "1.0 KiB", "5.0 GiB"]);
    }

    #[test]
    fn a_long_text_is_cut_and_says_so() {
        assert_eq!(shorten("abcdef", 6), "abcdef");
        assert_eq!(shorten("abcdefg", 6), "abcde…");
    }
}
