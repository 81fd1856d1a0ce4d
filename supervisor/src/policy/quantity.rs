//! Durations and sizes as people write them.
//!
//! A number alone is refused, because `memory = 2` means two bytes to nobody. So are zero, a sign and nothing at all:
//! none of them is a way to say unlimited, which has a word of its own.

use super::limits::Bound;
use std::time::Duration;

/// Why a text is no quantity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuantityError {
    /// Nothing there.
    #[error("is empty")]
    Empty,
    /// Zero, which somebody might mean as unlimited.
    #[error("is zero, which would allow nothing; write \"unlimited\" for no limit")]
    Zero,
    /// A number without a unit.
    #[error("has no unit")]
    NoUnit,
    /// A unit that is none.
    #[error("has the unknown unit `{0}`")]
    Unit(String),
    /// Not a positive number.
    #[error("is not a positive number")]
    Number,
    /// Too large to count.
    #[error("is too large")]
    TooLarge,
}

/// What a duration may look like, for messages.
pub const DURATION_FORM: &str =
    "a duration such as \"90s\", \"10min\", \"1h30m\" (ms, s, m or min, h, d), or \"unlimited\"";

/// What a size may look like, for messages.
pub const SIZE_FORM: &str =
    "a size such as \"512MiB\", \"2GiB\", \"100M\" (B; K, M, G, T or KiB, MiB, … of 1024; KB, MB, … of 1000), or \"unlimited\"";

/// What a count may look like, for messages.
pub const COUNT_FORM: &str = "a whole number from 1, or \"unlimited\"";

/// What a number of processors may look like, for messages.
pub const CPUS_FORM: &str = "a number of processors such as 2 or 0.5, or \"unlimited\"";

/// The one word for no limit.
const UNLIMITED: &str = "unlimited";

/// Reads a duration, `unlimited` included.
///
/// # Errors
///
/// As [`QuantityError`] has them.
pub fn duration(text: &str) -> Result<Bound<Duration>, QuantityError> {
    if text == UNLIMITED {
        return Ok(Bound::Unlimited);
    }
    let mut total: u128 = 0;
    let mut rest = text;
    while !rest.is_empty() {
        let (part, after) = next_part(rest)?;
        let microseconds = match part.unit {
            "ms" => 1_000,
            "s" | "sec" => 1_000_000,
            "m" | "min" => 60_000_000,
            "h" => 3_600_000_000,
            "d" => 86_400_000_000,
            "" => return Err(part.without_unit()),
            unknown => return Err(QuantityError::Unit(unknown.to_owned())),
        };
        total = total.checked_add(part.times(microseconds)?).ok_or(QuantityError::TooLarge)?;
        rest = after;
    }
    match u64::try_from(total) {
        _ if text.is_empty() => Err(QuantityError::Empty),
        Ok(0) => Err(QuantityError::Zero),
        Ok(total) => Ok(Bound::At(Duration::from_micros(total))),
        Err(_too_large) => Err(QuantityError::TooLarge),
    }
}

/// Reads a size in bytes, `unlimited` included.
///
/// Units are those of the GNU coreutils ("Block size" in their manual): a letter alone or with `iB` counts by 1024, a
/// letter with `B` by 1000. Case does not matter.
///
/// # Errors
///
/// As [`QuantityError`] has them.
pub fn size(text: &str) -> Result<Bound<u64>, QuantityError> {
    if text == UNLIMITED {
        return Ok(Bound::Unlimited);
    }
    if text.is_empty() {
        return Err(QuantityError::Empty);
    }
    let (part, after) = next_part(text)?;
    if !after.is_empty() {
        return Err(QuantityError::Number);
    }
    let factor = match part.unit.to_ascii_lowercase().as_str() {
        "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        "" => return Err(part.without_unit()),
        _ => return Err(QuantityError::Unit(part.unit.to_owned())),
    };
    match u64::try_from(part.times(factor)?) {
        Ok(0) => Err(QuantityError::Zero),
        Ok(bytes) => Ok(Bound::At(bytes)),
        Err(_too_large) => Err(QuantityError::TooLarge),
    }
}

/// Reads a count, `unlimited` included.
///
/// # Errors
///
/// As [`QuantityError`] has them.
pub fn count(text: &str) -> Result<Bound<u64>, QuantityError> {
    match text {
        UNLIMITED => Ok(Bound::Unlimited),
        "" => Err(QuantityError::Empty),
        digits if !digits.bytes().all(|byte| byte.is_ascii_digit()) => Err(QuantityError::Number),
        digits => match digits.parse() {
            Ok(0) => Err(QuantityError::Zero),
            Ok(count) => Ok(Bound::At(count)),
            Err(_too_large) => Err(QuantityError::TooLarge),
        },
    }
}

/// Reads a number of processors, `unlimited` included.
///
/// # Errors
///
/// As [`QuantityError`] has them.
pub fn cpus(text: &str) -> Result<Bound<f64>, QuantityError> {
    if text == UNLIMITED {
        return Ok(Bound::Unlimited);
    }
    if text.is_empty() {
        return Err(QuantityError::Empty);
    }
    let (part, after) = next_part(text)?;
    if !part.unit.is_empty() {
        return Err(QuantityError::Unit(part.unit.to_owned()));
    }
    if !after.is_empty() {
        return Err(QuantityError::Number);
    }
    // The cgroup's quota counts in microseconds of a tenth of a second; a thousandth of a processor is what it can hold.
    match part.times(1_000)? {
        0 => Err(QuantityError::Zero),
        thousandths if thousandths <= u128::from(MOST_CPUS) * 1_000 => Ok(Bound::At(thousandths as f64 / 1_000.0)),
        _ => Err(QuantityError::TooLarge),
    }
}

/// More processors than Linux can run on (`NR_CPUS` is at most 8192 on the architectures we build for).
const MOST_CPUS: u32 = 8192;

/// A decimal number and the letters after it.
struct Part<'a> {
    whole: &'a str,
    fraction: &'a str,
    unit: &'a str,
}

impl Part<'_> {
    /// What to say of a number without a unit. Zero is zero in every unit, and its message is the one that helps.
    fn without_unit(&self) -> QuantityError {
        match [self.whole, self.fraction].concat().bytes().all(|digit| digit == b'0') {
            true => QuantityError::Zero,
            false => QuantityError::NoUnit,
        }
    }

    /// The number times an integer, rounded down.
    fn times(&self, factor: u64) -> Result<u128, QuantityError> {
        let too_large = |_| QuantityError::TooLarge;
        let digits = format!("{}{}", self.whole, self.fraction).parse::<u128>().map_err(too_large)?;
        let scale = 10u128.pow(self.fraction.len() as u32);
        Ok(digits.checked_mul(u128::from(factor)).ok_or(QuantityError::TooLarge)? / scale)
    }
}

fn next_part(text: &str) -> Result<(Part<'_>, &str), QuantityError> {
    let (whole, rest) = split_while(text, |letter| letter.is_ascii_digit());
    let (fraction, rest) = match rest.strip_prefix('.') {
        Some(rest) => split_while(rest, |letter| letter.is_ascii_digit()),
        None => ("", rest),
    };
    let (unit, rest) = split_while(rest, |letter| letter.is_alphabetic());
    // Nine digits after the point are a nanosecond or a byte of a gigabyte; more are a mistake, and 18 before it are
    // beyond every unit.
    if whole.is_empty() || (rest.len() == text.len()) || text[whole.len()..].starts_with('.') && fraction.is_empty() {
        return Err(QuantityError::Number);
    }
    if whole.len() > 18 || fraction.len() > 9 {
        return Err(QuantityError::TooLarge);
    }
    Ok((Part { whole, fraction, unit }, rest))
}

fn split_while(text: &str, holds: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(|letter| !holds(letter)).unwrap_or(text.len()))
}
