//! Time as the ledger writes it, and where it and chance come from.
//!
//! Clock and randomness are handed in, so that tests can hold them still.

use serde::{Deserialize, Serialize};
use std::{
    fmt,
    io::Read as _,
    str::FromStr,
    sync::OnceLock,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

/// Microseconds since 1970-01-01T00:00:00Z, leap seconds not counted.
///
/// Written as RFC 3339 in UTC with six digits of a second: `2026-11-30T22:08:31.000042Z`. Only the years 0 to 9999
/// can be written so; a time outside them is written as the nearest one inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timestamp(pub i64);

/// A time as text, in what is exported.
pub(super) mod written {
    use super::Timestamp;
    use serde::{Deserialize as _, Deserializer, Serializer};

    /// Writes RFC 3339.
    pub fn serialize<S: Serializer>(time: &Timestamp, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(time)
    }

    /// Reads RFC 3339.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Timestamp, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

const DAY_US: i64 = 86_400_000_000;
/// 0000-01-01T00:00:00.000000Z.
const EARLIEST_US: i64 = -62_167_219_200_000_000;
/// 9999-12-31T23:59:59.999999Z.
const LATEST_US: i64 = 253_402_300_799_999_999;

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let us = self.0.clamp(EARLIEST_US, LATEST_US);
        let (year, month, day) = date_of(us.div_euclid(DAY_US));
        let rest = us.rem_euclid(DAY_US);
        let (seconds, micros) = (rest / 1_000_000, rest % 1_000_000);
        let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
        write!(f, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
    }
}

/// A text that is not a time of the form `2026-11-30T22:08:31.000042Z`.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("`{0}` is not an RFC 3339 time; write it like 2026-11-30T22:08:31Z or with an offset like +01:00")]
pub struct BadTimestamp(pub String);

impl FromStr for Timestamp {
    type Err = BadTimestamp;

    /// Reads RFC 3339 with any offset; digits of a second beyond the sixth are cut off.
    fn from_str(text: &str) -> Result<Timestamp, BadTimestamp> {
        parse(text.as_bytes()).map(Timestamp).ok_or_else(|| BadTimestamp(text.to_owned()))
    }
}

fn parse(text: &[u8]) -> Option<i64> {
    let number = |from: usize, to: usize| -> Option<i64> {
        let digits = text.get(from..to)?;
        digits.iter().all(u8::is_ascii_digit).then_some(())?;
        std::str::from_utf8(digits).ok()?.parse().ok()
    };
    let is = |at: usize, wanted: &[u8]| text.get(at).is_some_and(|byte| wanted.contains(byte));
    (is(4, b"-") && is(7, b"-") && is(10, b"Tt ") && is(13, b":") && is(16, b":")).then_some(())?;
    let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
    let (hour, minute, second) = (number(11, 13)?, number(14, 16)?, number(17, 19)?);
    // A leap second, :60, is read as the second after it: the count of RFC 3339's examples has no place for it.
    ((1..=12).contains(&month) && hour < 24 && minute < 60 && second <= 60).then_some(())?;
    let days = days_to(year, month, day);
    (day >= 1 && date_of(days) == (year, month, day)).then_some(())?;
    let mut at = 19;
    let mut micros = 0;
    if is(at, b".") {
        let digits = text[at + 1..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        (digits > 0).then_some(())?;
        for place in 0..6 {
            let digit = if place < digits { i64::from(text[at + 1 + place] - b'0') } else { 0 };
            micros = micros * 10 + digit;
        }
        at += 1 + digits;
    }
    let offset_minutes = match text.get(at)? {
        b'Z' | b'z' => {
            at += 1;
            0
        }
        sign @ (b'+' | b'-') => {
            let (hours, minutes) = (number(at + 1, at + 3)?, number(at + 4, at + 6)?);
            (is(at + 3, b":") && hours < 24 && minutes < 60).then_some(())?;
            at += 6;
            (hours * 60 + minutes) * if *sign == b'-' { -1 } else { 1 }
        }
        _ => return None,
    };
    (at == text.len()).then_some(())?;
    Some(days * DAY_US + (((hour * 60 + minute - offset_minutes) * 60) + second) * 1_000_000 + micros)
}

/// Days since the epoch of a day of the proleptic Gregorian calendar. Years are counted from March, so that the leap
/// day is the last of its year; 400 years are always 146,097 days.
fn days_to(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

/// The inverse of [`days_to`].
fn date_of(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let era = days.div_euclid(146_097);
    let day_of_era = days.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

/// Where time and chance come from.
pub trait Clock: Send + Sync {
    /// The time of day, for what is written down.
    fn now(&self) -> Timestamp;

    /// Microseconds since some fixed moment, for what is measured. Never goes back.
    fn monotonic_us(&self) -> u64;

    /// Bits that no one can guess, for the tail of a run's id.
    fn random(&self) -> u64;
}

/// The machine's own clocks and random numbers.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        let us = match SystemTime::now().duration_since(UNIX_EPOCH) {
            Ok(since) => i64::try_from(since.as_micros()).unwrap_or(LATEST_US),
            Err(before) => i64::try_from(before.duration().as_micros()).map_or(EARLIEST_US, |us| -us),
        };
        Timestamp(us)
    }

    fn monotonic_us(&self) -> u64 {
        static START: OnceLock<Instant> = OnceLock::new();
        u64::try_from(START.get_or_init(Instant::now).elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    fn random(&self) -> u64 {
        let mut bytes = [0; 8];
        match std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)) {
            Ok(()) => u64::from_ne_bytes(bytes),
            // Without /dev, the hash seeds that std takes from getrandom(2) serve: an id needs to be fresh, not secret.
            Err(_) => {
                use std::hash::{BuildHasher as _, Hasher as _};
                std::collections::hash_map::RandomState::new().build_hasher().finish()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn known_moments_are_written_and_read() {
        for (us, text) in [
            (0, "1970-01-01T00:00:00.000000Z"),
            (-1, "1969-12-31T23:59:59.999999Z"),
            (951_827_696_000_000, "2000-02-29T12:34:56.000000Z"),
            (1_796_076_511_000_042, "2026-11-30T22:08:31.000042Z"),
            (-2_203_891_201_000_000, "1900-02-28T23:59:59.000000Z"),
            (-2_203_891_200_000_000, "1900-03-01T00:00:00.000000Z"),
            (EARLIEST_US, "0000-01-01T00:00:00.000000Z"),
            (LATEST_US, "9999-12-31T23:59:59.999999Z"),
        ] {
            assert_eq!(Timestamp(us).to_string(), text);
            assert_eq!(text.parse(), Ok(Timestamp(us)));
        }
        assert_eq!(Timestamp(i64::MAX).to_string(), "9999-12-31T23:59:59.999999Z");
        assert_eq!(Timestamp(i64::MIN).to_string(), "0000-01-01T00:00:00.000000Z");
    }

    #[test]
    fn offsets_and_fractions_are_read() {
        let noon = "2026-11-30T12:00:00Z".parse::<Timestamp>().unwrap();
        for text in ["2026-11-30T13:00:00+01:00", "2026-11-30t06:30:00.0-05:30", "2026-11-30 12:00:00.0000009z"] {
            assert_eq!(text.parse(), Ok(noon), "{text}");
        }
        assert_eq!("2026-11-30T12:00:00.5Z".parse(), Ok(Timestamp(noon.0 + 500_000)));
        assert_eq!("2026-12-31T23:59:60Z".parse::<Timestamp>(), "2027-01-01T00:00:00Z".parse());
    }

    #[test]
    fn what_is_no_time_is_refused() {
        for text in [
            "",
            "2026",
            "2026-11-30",
            "2026-11-30T22:08:31",
            "2026-02-29T00:00:00Z",
            "2026-13-01T00:00:00Z",
            "2026-00-01T00:00:00Z",
            "2026-01-00T00:00:00Z",
            "2026-01-01T24:00:00Z",
            "2026-01-01T00:00:00.Z",
            "2026-01-01T00:00:00Zx",
            "2026-01-01T00:00:00+0100",
            "+026-01-01T00:00:00Z",
            "2026-01-01T00:00:00+1",
        ] {
            assert!(text.parse::<Timestamp>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back_and_sorts_alike(a in EARLIEST_US..=LATEST_US, b in EARLIEST_US..=LATEST_US) {
            let (one, other) = (Timestamp(a), Timestamp(b));
            prop_assert_eq!(one.to_string().parse(), Ok(one));
            prop_assert_eq!(one.to_string().cmp(&other.to_string()), one.cmp(&other));
        }

        #[test]
        fn no_text_makes_it_panic(text in "[0-9TZtz:+. -]{0,40}|.{0,30}") {
            let _ = text.parse::<Timestamp>();
        }
    }
}
