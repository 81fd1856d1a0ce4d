//! The least HTTP/1.1 that asks our own supervisor one thing.
//!
//! One request a connection. Answers of anybody else are not expected, so whatever is not exactly what our supervisor
//! sends is an error: a length is always announced, and nothing is longer than [`MAX_BODY`].

use std::{
    io::{self, Read as _, Write as _},
    os::unix::net::UnixStream,
    path::Path,
};

/// The longest answer in bytes: a list of 100,000 names of 255 bytes, and what is around them.
const MAX_BODY: usize = 64 * 1024 * 1024;

/// The longest head of an answer in bytes.
const MAX_HEAD: usize = 16 * 1024;

/// An answer.
#[derive(Debug)]
pub(super) struct Answer {
    /// The status.
    pub(super) status: u16,
    /// The body.
    pub(super) body: Vec<u8>,
}

/// Asks one thing and waits for the answer, however long a person takes to approve it.
///
/// # Errors
/// As connect(2), write(2) and read(2); `InvalidData` for an answer that is not one of our supervisor's.
pub(super) fn ask(socket: &Path, method: &str, target: &str, body: &[u8]) -> io::Result<Answer> {
    let mut stream = UnixStream::connect(socket)?;
    let head = format!(
        "{method} {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    match stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body)) {
        // The supervisor may say no without having read everything, and what it said is there to be read.
        Err(cause) if cause.kind() == io::ErrorKind::BrokenPipe => {}
        sent => sent?,
    }
    answer(&mut stream)
}

fn answer(stream: &mut impl io::Read) -> io::Result<Answer> {
    let invalid = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let mut received = Vec::new();
    let mut piece = [0; 8 * 1024];
    let end = loop {
        if let Some(end) = received.windows(4).position(|window| window == b"\r\n\r\n") {
            break end;
        }
        if received.len() > MAX_HEAD {
            return Err(invalid("the answer's head is too long"));
        }
        match stream.read(&mut piece) {
            Ok(0) => return Err(invalid("the connection closed without an answer")),
            Ok(length) => received.extend_from_slice(&piece[..length]),
            Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
            Err(cause) => return Err(cause),
        }
    };
    let mut body = received.split_off(end + 4);
    let head = std::str::from_utf8(&received[..end]).map_err(|_| invalid("the answer's head is not text"))?;
    let mut lines = head.split("\r\n");
    let status = lines
        .next()
        .and_then(|line| line.strip_prefix("HTTP/1.1 "))
        .and_then(|rest| rest.get(..3))
        .filter(|digits| digits.bytes().all(|digit| digit.is_ascii_digit()))
        .and_then(|digits| digits.parse().ok())
        .ok_or_else(|| invalid("the answer has no status"))?;
    let mut length = None;
    for line in lines {
        let (name, value) = line.split_once(':').ok_or_else(|| invalid("the answer has a wrong header"))?;
        if name.eq_ignore_ascii_case("content-length") {
            if length.is_some() {
                return Err(invalid("the answer has two lengths"));
            }
            let value = value.trim();
            let digits = !value.is_empty() && value.bytes().all(|digit| digit.is_ascii_digit());
            let parsed = value.parse::<usize>().ok().filter(|length| digits && *length <= MAX_BODY);
            length = Some(parsed.ok_or_else(|| invalid("the answer's length is wrong or too long"))?);
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            return Err(invalid("the answer is encoded"));
        }
    }
    let length = length.ok_or_else(|| invalid("the answer has no length"))?;
    let missing = length.checked_sub(body.len()).ok_or_else(|| invalid("the answer is longer than announced"))?;
    let got = stream.take(missing as u64).read_to_end(&mut body)?;
    if got != missing {
        return Err(invalid("the answer is shorter than announced"));
    }
    Ok(Answer { status, body })
}

/// Percent-encodes everything but what RFC 3986 calls unreserved, and the slash.
pub(super) fn percent_encode(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len()), |mut text, byte| {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => text.push(char::from(*byte)),
            other => text.push_str(&format!("%{other:02X}")),
        }
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &[u8]) -> io::Result<Answer> {
        answer(&mut &text[..])
    }

    #[test]
    fn an_answer_has_a_status_and_exactly_its_body() {
        let told = parse(b"HTTP/1.1 403 Forbidden\r\nX: y\r\nContent-Length: 2\r\n\r\nno").expect("is an answer");
        assert_eq!((told.status, told.body.as_slice()), (403, b"no".as_slice()));
    }

    #[test]
    fn what_our_supervisor_never_sends_is_an_error() {
        let long = format!("HTTP/1.1 200 OK\r\nx: {}\r\n\r\n", "a".repeat(MAX_HEAD * 2));
        let rows: [&[u8]; 12] = [
            b"",
            b"HTTP/1.1 200 OK\r\n",
            b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n",
            b"HTTP/1.1 2\xc3\xa9 OK\r\ncontent-length: 0\r\n\r\n",
            b"HTTP/1.1 200 OK\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nab",
            b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nab",
            b"HTTP/1.1 200 OK\r\ncontent-length: +1\r\n\r\na",
            b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 1\r\n\r\na",
            b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            long.as_bytes(),
        ];
        for row in rows {
            assert!(parse(row).is_err(), "{}", String::from_utf8_lossy(row));
        }
    }

    #[test]
    fn every_byte_of_a_path_survives() {
        assert_eq!(percent_encode(b"a/b c%\xff?"), "a/b%20c%25%FF%3F");
    }
}
