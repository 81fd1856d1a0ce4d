//! How this process takes memory from the system while it holds one run.
//!
//! glibc gives each thread that allocates a heap of its own (mallopt(3), `M_ARENA_MAX`): faster where many threads
//! allocate all the time, and some hundred KiB for each run here, whose threads wait nearly always.

/// Lets all threads share one heap. Call it before any thread exists.
#[cfg(target_env = "gnu")]
#[allow(unsafe_code)]
pub fn share_one_heap() {
    // SAFETY: mallopt(3) sets a number of the allocator's under the allocator's own lock, and keeps no pointer of ours.
    // Where it says no, nothing but memory is lost.
    let _ = unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// Other C libraries have one heap anyway.
#[cfg(not(target_env = "gnu"))]
pub fn share_one_heap() {}
