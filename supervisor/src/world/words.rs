//! What a program says first on a connection, by which it is told what the connection speaks.
//!
//! Looked at and left there to be read. What may become a request is never taken for something else because it comes
//! slowly, in small letters or after an empty line: servers are lenient, so this is too.

use rustls::server::Acceptor;
use std::time::Duration;
use tokio::{net::TcpStream, time::timeout};

/// The longest first words that are looked at: a TLS record's most content and its head (RFC 8446, section 5.1), which
/// is more than the request line that any server takes.
const MOST: usize = 16 * 1024 + 5;

/// How long to wait before looking again at words that are not whole: peeking at a socket that has some returns at once.
const AGAIN: Duration = Duration::from_millis(2);

/// What a connection speaks, as far as its first words say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Speaks {
    /// A TLS handshake, with the server name that it asks for.
    Tls(Option<String>),
    /// HTTP.
    Http,
    /// Anything else.
    Other,
    /// Nothing, in the time that it had.
    Nothing,
}

/// Waits for the first words: `silence` for the first byte, and `most` until they can be told. Words that are still
/// the beginning of a request then are one, and whoever reads it may wait for the rest.
pub async fn first_words(stream: &TcpStream, silence: Duration, most: Duration) -> Speaks {
    let mut bytes = vec![0; MOST];
    let Ok(Ok(1..)) = timeout(silence, stream.peek(&mut bytes[..1])).await else { return Speaks::Nothing };
    let telling = async {
        let mut seen = 0;
        loop {
            let Ok(length @ 1..) = stream.peek(&mut bytes).await else { return Speaks::Nothing };
            if let Some(speaks) = tell(&bytes[..length]) {
                return speaks;
            }
            if length == MOST {
                return unfinished(bytes[0]);
            }
            if length == seen {
                tokio::time::sleep(AGAIN).await;
            }
            seen = length;
        }
    };
    let told = timeout(most, telling).await;
    told.unwrap_or_else(|_elapsed| unfinished(bytes[0]))
}

fn unfinished(first: u8) -> Speaks {
    match first {
        HANDSHAKE => Speaks::Tls(None),
        _ => Speaks::Http,
    }
}

/// The type of a TLS record that begins a handshake (RFC 8446, section 5.1).
const HANDSHAKE: u8 = 22;

/// What the first bytes say; none where there are too few to tell.
fn tell(bytes: &[u8]) -> Option<Speaks> {
    match bytes.first()? {
        &HANDSHAKE => handshake(bytes),
        _ => request_line(bytes),
    }
}

fn handshake(mut bytes: &[u8]) -> Option<Speaks> {
    let mut acceptor = Acceptor::default();
    while !bytes.is_empty() {
        acceptor.read_tls(&mut bytes).ok()?;
        match acceptor.accept() {
            Ok(Some(accepted)) => return Some(Speaks::Tls(accepted.client_hello().server_name().map(str::to_owned))),
            Ok(None) => {}
            // No handshake that rustls knows.
            Err(_unknown) => return Some(Speaks::Tls(None)),
        }
    }
    None
}

/// A request line (RFC 9112, section 3), with what servers are to be lenient about: empty lines before it (section
/// 2.2), a line feed alone, any method, tabs for spaces, no version.
fn request_line(bytes: &[u8]) -> Option<Speaks> {
    let start = bytes.iter().position(|byte| !matches!(byte, b'\r' | b'\n'))?;
    let rest = &bytes[start..];
    let is_blank = |byte: &u8| matches!(byte, b' ' | b'\t');
    // The characters of a method (RFC 9110, section 5.6.2).
    let is_token = |byte: &u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte);
    let method = rest.iter().take_while(|byte| is_token(byte)).count();
    if method == 0 {
        return Some(Speaks::Other);
    }
    match rest.get(method) {
        None => return None,
        Some(byte) if is_blank(byte) => {}
        Some(_) => return Some(Speaks::Other),
    }
    let target = method + rest[method..].iter().take_while(|byte| is_blank(byte)).count();
    let line = &rest[target..];
    match line.first()? {
        b'/' | b'*' => return Some(Speaks::Http),
        _ => {}
    }
    let end = line.iter().position(|byte| *byte == b'\n');
    let text = &line[..end.unwrap_or(line.len())];
    let holds = |wanted: &[u8]| text.windows(wanted.len()).any(|window| window.eq_ignore_ascii_case(wanted));
    match end {
        _ if holds(b"HTTP/") || holds(b"http://") || holds(b"https://") => Some(Speaks::Http),
        Some(_) => Some(Speaks::Other),
        None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_a_server_would_take_for_a_request_is_one() {
        for bytes in [
            &b"GET / HTTP/1.1"[..],
            b"PRI * HTTP/2.0",
            b"M-SEARCH * HTTP/1.1",
            b"CONNECT a.test:443 HTTP/1.1",
            b"GET http://a.test/ HTTP/1.1",
            b"delete /x HTTP/1.1",
            b"\r\nDELETE /x HTTP/1.1",
            b"\n\n\nGET /",
            b"GET\t/x HTTP/1.1",
            b"GET  /x",
            b"X a.test HTTP/1.0\n",
        ] {
            assert_eq!(tell(bytes), Some(Speaks::Http), "{:?}", String::from_utf8_lossy(bytes));
        }
    }

    #[test]
    fn the_beginning_of_a_request_is_waited_on() {
        for bytes in [&b"G"[..], b"GET", b"GET ", b"\r\n", b"CONNECT a.test:443 ", b""] {
            assert_eq!(tell(bytes), None, "{:?}", String::from_utf8_lossy(bytes));
        }
    }

    #[test]
    fn other_protocols_are_told_at_their_first_line() {
        for bytes in
            [&b"SSH-2.0-OpenSSH_9.2 Debian\r\n"[..], b"EHLO me\r\n", b"PING\r\n", b"hi\n", b"\0\0\0\x08", b"\xff"]
        {
            assert_eq!(tell(bytes), Some(Speaks::Other), "{:?}", String::from_utf8_lossy(bytes));
        }
    }

    proptest! {
        /// However a request is cut, no part of it is taken for another protocol.
        #[test]
        fn no_prefix_of_a_request_is_something_else(
            line in "(\r\n){0,2}[A-Za-z]{1,12} {1,2}(/[a-z]{0,9}|http://a.test/|a.test:443) HTTP/1.[01]\r\n",
            cut in 0usize..64,
        ) {
            let bytes = line.as_bytes();
            prop_assert_ne!(tell(&bytes[..cut.min(bytes.len())]), Some(Speaks::Other));
            prop_assert_eq!(tell(bytes), Some(Speaks::Http));
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = tell(&bytes);
            let _ = tell(&[&[HANDSHAKE, 3, 1], &bytes[..]].concat());
        }
    }
}
