//! Base64 with padding (RFC 4648, section 4), for file contents inside JSON.
//!
//! Decoding accepts exactly what encoding gives: no white space, no missing padding, no stray bits. Contents of any
//! size travel raw, by `/v1/files`; this is for small ones.

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// Encodes bytes.
pub fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let word =
            u32::from_be_bytes([0, group[0], group.get(1).copied().unwrap_or(0), group.get(2).copied().unwrap_or(0)]);
        for place in 0..4 {
            if place > group.len() {
                text.push('=');
            } else {
                text.push(char::from(ALPHABET[(word >> (18 - 6 * place)) as usize & 63]));
            }
        }
    }
    text
}

/// Decodes text; none where it is not the encoding of anything.
pub fn decode(text: &str) -> Option<Vec<u8>> {
    let text = text.as_bytes();
    if !text.len().is_multiple_of(4) {
        return None;
    }
    let digits = match text {
        [rest @ .., b'=', b'='] | [rest @ .., b'='] => rest,
        all => all,
    };
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    for group in digits.chunks(4) {
        let mut word = 0u32;
        for &digit in group {
            word = word << 6 | value(digit)?;
        }
        word <<= 6 * (4 - group.len());
        let whole = word.to_be_bytes();
        // Of 2 digits one byte is whole, of 3 digits two; the bits beyond must be zero, or two texts would mean one.
        let length = group.len().checked_sub(1).filter(|length| *length > 0)?;
        if whole[1 + length..].iter().any(|byte| *byte != 0) {
            return None;
        }
        bytes.extend_from_slice(&whole[1..=length]);
    }
    Some(bytes)
}

fn value(digit: u8) -> Option<u32> {
    Some(match digit {
        b'A'..=b'Z' => u32::from(digit - b'A'),
        b'a'..=b'z' => u32::from(digit - b'a') + 26,
        b'0'..=b'9' => u32::from(digit - b'0') + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_vectors_of_rfc_4648_hold() {
        let vectors = [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ];
        for (plain, coded) in vectors {
            assert_eq!(encode(plain.as_bytes()), coded);
            assert_eq!(decode(coded).as_deref(), Some(plain.as_bytes()));
        }
    }

    #[test]
    fn only_the_one_encoding_is_accepted() {
        for text in ["Zg", "Zg=", "Zh==", "Zm9=", "Z===", "====", "Zm 9v", "Zg==Zg==", "Zm9-"] {
            assert_eq!(decode(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn decode_undoes_encode(bytes: Vec<u8>) {
            prop_assert_eq!(decode(&encode(&bytes)), Some(bytes));
        }

        #[test]
        fn what_decodes_is_its_own_encoding(text in "[A-Da-d+/=]{0,12}") {
            if let Some(bytes) = decode(&text) {
                prop_assert_eq!(encode(&bytes), text);
            }
        }
    }
}
