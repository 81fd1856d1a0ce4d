//! What one small effect costs at the API door, and what as many bytes cost over a bare socket.
//!
//! `door effects COUNT` is a client in a jail: it reads and writes `small` that often over one connection to
//! `$TOLLGATE_SOCKET`, and says how many bytes went each way. `door bare REQUEST ANSWER COUNT` sends as many bytes to
//! and fro between two processes. Each prints one JSON object a line; times are of single exchanges.

use std::{
    error::Error,
    io::{self, Read, Write},
    os::{fd::OwnedFd, unix::net::UnixStream},
    process::{Child, Command, ExitCode, Stdio},
    time::Instant,
};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// What the file holds, and is written.
const CONTENT: &[u8; 5] = b"small";
/// Exchanges before the first that counts, for each hundred that do.
const WARM: usize = 10;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| arguments.get(at).and_then(|text| text.parse::<usize>().ok()).unwrap_or(0);
    let done = match arguments.first().map(String::as_str) {
        Some("effects") if number(1) > 0 => effects(number(1)),
        Some("bare") if number(3) > 0 => bare(number(1), number(2), number(3)),
        Some("echo") => echo(number(1), number(2)),
        _ => {
            eprintln!("error: unknown arguments\nhint: door effects COUNT, or door bare REQUEST ANSWER COUNT");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn effects(count: usize) -> Outcome<()> {
    let socket = std::env::var_os("TOLLGATE_SOCKET").ok_or("`TOLLGATE_SOCKET` is not set: this runs in a jail")?;
    let mut stream = UnixStream::connect(socket)?;
    let read = b"GET /v1/files/small HTTP/1.1\r\nhost: t\r\n\r\n".to_vec();
    let mut write = b"PUT /v1/files/small HTTP/1.1\r\nhost: t\r\ncontent-length: 5\r\n\r\n".to_vec();
    write.extend_from_slice(CONTENT);
    for (work, request) in [("write", write), ("read", read)] {
        let mut answered = 0;
        let times = timed(count, || {
            stream.write_all(&request)?;
            answered = answer(&mut stream)?;
            Ok(())
        })?;
        report(work, request.len(), answered, &times);
    }
    Ok(())
}

/// Reads one answer whole, and gives its length. Anything but a success is an error.
fn answer(stream: &mut UnixStream) -> io::Result<usize> {
    let invalid = |answer: &[u8]| io::Error::other(String::from_utf8_lossy(answer).into_owned());
    let mut buffer = [0; 4096];
    let mut filled = 0;
    loop {
        match stream.read(&mut buffer[filled..])? {
            0 => return Err(invalid(&buffer[..filled])),
            length => filled += length,
        }
        let answer = &buffer[..filled];
        let Some(head) = answer.windows(4).position(|window| window == b"\r\n\r\n") else { continue };
        let lines = String::from_utf8_lossy(&answer[..head]).to_ascii_lowercase();
        let announced = lines.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
        let whole = head + 4 + announced.ok_or_else(|| invalid(answer))?;
        if filled >= whole {
            return if lines.starts_with("http/1.1 200") { Ok(whole) } else { Err(invalid(answer)) };
        }
    }
}

/// Bytes to and fro over a socket pair, between this process and a child.
fn bare(request: usize, answer: usize, count: usize) -> Outcome<()> {
    let (mut ours, theirs) = UnixStream::pair()?;
    let mut child: Child = Command::new(std::env::current_exe()?)
        .args(["echo", &request.to_string(), &answer.to_string()])
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .spawn()?;
    let (sent, mut got) = (vec![b'x'; request], vec![0; answer]);
    let times = timed(count, || {
        ours.write_all(&sent)?;
        ours.read_exact(&mut got)
    })?;
    drop(ours);
    child.wait()?;
    report("bare", request, answer, &times);
    Ok(())
}

/// The other end, on standard input, until it is closed.
fn echo(request: usize, answer: usize) -> Outcome<()> {
    let mut stream = UnixStream::from(std::os::fd::AsFd::as_fd(&io::stdin()).try_clone_to_owned()?);
    let (mut got, sent) = (vec![0; request], vec![b'y'; answer]);
    while stream.read_exact(&mut got).is_ok() {
        stream.write_all(&sent)?;
    }
    Ok(())
}

/// How long each exchange takes, in microseconds, sorted.
fn timed(count: usize, mut exchange: impl FnMut() -> io::Result<()>) -> io::Result<Vec<f64>> {
    for _ in 0..count * WARM / 100 {
        exchange()?;
    }
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let began = Instant::now();
        exchange()?;
        times.push(began.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    Ok(times)
}

fn report(work: &str, request: usize, answer: usize, times: &[f64]) {
    let at = |share: f64| times.get((times.len() as f64 * share) as usize).copied().unwrap_or_default();
    println!(
        "{}",
        serde_json::json!({
            "work": work, "request": request, "answer": answer, "count": times.len(),
            "median_us": at(0.5), "p95_us": at(0.95),
        })
    );
}
